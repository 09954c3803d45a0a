"""What passes between two blocks that are in different processes.

block_inputs       hidden states, masks and positions of one forward call
host_copies        tensors that leave a device
cutting            where a call may be cut, and which calls may be joined
pictures           what pictures are to blocks besides hidden states
phantom_cache      the KV cache of blocks that are elsewhere
inner_states       what passes between the blocks of one call, for those who ask
activation_checks  whether what another peer computed can be right
activation_log     what has passed during a session, for the replay
"""
