"""One adapter, trained by several homes together. Their data stays at home.

rounds       when a round ends, and whose differences count; pure
differences  8-bit differences, their robust mean, the outer optimizer; pure, and bit for bit the same everywhere
privacy      noise, and the privacy budget that it leaves; pure
"""
