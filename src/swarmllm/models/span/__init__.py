"""The server's half of a model: some of its blocks, run by the model's own forward.

loading           blocks [a, b), read from a checkpoint
block_span        those blocks, one call after the other; outputs and attention weights of blocks, if a client asks
together          blocks that several processes run at once, each with some heads and features
offload           blocks that are in memory only while they compute
span_cache        their KV cache: buffers that grow, or pages
probes            traits of the blocks, observed when they are loaded
probe_results     these traits, kept on disk for the next start
small_copy        these traits, observed by clients without weights
trials            random inputs, float32, few threads, one part of each kind: how blocks are tried
packing           calls of several sessions, run together if they fit
packing_probe     ways of packing that give the right results
packed_caches     several sessions in one row, or as a padded batch
attention         switching a model to another attention function; fast attention of few new positions
page_pool         keys and values of all sessions in pages of one pool: taken, freed, written to, attended to
paged_attention   several sessions in one row, on pages
paged_kernels     the same by Triton, on CUDA
traced_step       decode steps on CPUs as straight lines of operations, without the model's code
step_recorder     the operations of such a step, recorded; adding an operation
exact_recorder    the same for blocks that must compute torch's own bits
decode_graphs     decode steps that are recorded once as CUDA graphs
fused_step        decode steps of blocks of Llama's kind, in few kernels
fused_kernels     these kernels
"""
