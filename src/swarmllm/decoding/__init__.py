"""Ways to choose the next token that transformers lacks, as logits processors; and one list of options for them.

options  the list: names, bounds, defaults; flags, fields of requests and of generate() are made from it
methods  the processors, one class for each method, and the choice of processors for given options
"""
