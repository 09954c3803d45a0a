"""The server's half of a model: some of its blocks, run by the model's own forward.

loading           blocks [a, b), read from a checkpoint
block_span        those blocks, one call after the other
offload           those of them that are in memory only while they compute
span_cache        their KV cache
cache_layer       keys and values of one block, in buffers that grow
inner_recording   what passes between its blocks, for those who ask
block_kinds       which blocks run the same code, so that one answers for all
probes            what the blocks need and can do, seen when they are loaded
probe_results     the same, kept on disk for the next start
small_copy        the same, seen by clients without weights
cache_probe       what their cache can do
length_probe      at which lengths of a call its positions are computed otherwise
kept_state        what modules keep of a call, put back before the next
padding_probe     on which sides padding makes no difference
random_inputs     what blocks are tried and measured on
packing           calls of several sessions, run together where they can be
packed_forward    those that fit together as one forward
packed_attention  sessions in one row, without padding
page_pool         keys and values of all sessions in pages of one pool
page_access       what is done with pages: writing to them, attention to them
paged_attention   sessions in one row, on pages
paged_kernels     the same by Triton, on CUDA
decode_graphs     decode steps that are recorded once as CUDA graphs
fused_step        decode steps of blocks of Llama's kind, in few kernels
fused_kernels     these kernels
attention         switching a model to another attention function; attention of few positions to many keys
padded_cache      sessions as rows of one batch, padded on the left
packing_probe     which ways of packing give the right results
"""
