"""Ways to choose the next token that transformers lacks, as logits processors; and one list of what can be asked for.

options                 the list: names, bounds, defaults; flags, fields of requests and of generate() come from it
processors              the processors that options ask for, in their order
truncation              tail-free sampling, top-n-sigma, XTC: some tokens are left without a chance
mirostat                the same, so that the surprise per token stays where it is wanted
dry                     what would repeat the text is made less likely
frustratingly_simple    the likeliest token that the text so far doesn't foretell
text_so_far             where padding ends, and which tokens end a repetition
"""
