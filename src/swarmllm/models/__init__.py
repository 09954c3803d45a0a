"""Models, cut into a client's part and blocks: everything that knows torch and transformers, and no network.

architecture        what a Hugging Face model is made of, and how long its texts may be
block_slots         a block list of which only some blocks are here; what only the first block has
free_memory         memory that has been freed, given back to the system
checkpoint/         what is on disk
published_formats/  how weights of few bits are stored
quantization/       how weights are kept in memory
parallel/           one block's matrices over several devices
adapters/           what changes blocks
boundary/           what passes between blocks
span/               the server's half: some blocks, run
shell/              the client's half: everything but the blocks
"""
