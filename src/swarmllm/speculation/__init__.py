"""Speculation over a swarm, which transformers lacks: guessed tokens are sent along before the known ones are back.

sampling_loop  `generate()`'s sampling loop with guesses under way
drafters       the guesses: n-grams, a small model, a head of the model's own; the fastest of several
planner        how far to run ahead
"""
