"""Models, cut into a client's part and blocks: everything that knows torch and transformers, and no network.

architecture        the parts of a Hugging Face model, its longest text, and the architectures that are refused
block_slots         the block list of a model that has only some of its blocks
checkpoint/         models on disk
published_formats/  formats of published weights in few bits
quantization/       weights in memory
parallel/           one block's matrices over several devices
adapters/           changes of blocks
boundary/           everything that passes between blocks
span/               the server's half: some blocks, run
shell/              the client's half: everything but the blocks
"""
