"""Everything that passes between two blocks in different processes.

block_inputs       hidden states, masks and positions of one forward call; where a call may be cut
device_copies      copies between host memory and a device, few for many tensors
phantom_cache      the KV cache of blocks that are elsewhere
inner_states       checks of activations; outputs and attention weights of the blocks of a call
activation_log     the inputs of a session at one boundary, for the replay
"""
