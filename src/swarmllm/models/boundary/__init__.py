"""What passes between two blocks that are in different processes.

block_inputs       hidden states, masks and positions of one forward call
pictures           what pictures are to blocks besides hidden states
phantom_cache      the KV cache of blocks that are elsewhere
inner_states       what passes between the blocks of one call, for those who ask
activation_log     what has passed during a session, for the replay
"""
