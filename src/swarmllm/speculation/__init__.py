"""Speculation over a swarm, which transformers lacks: guessed tokens are sent along before the known ones are back.

sampling_loop  `generate()`'s sampling loop with guesses under way
drafters       the guesses: n-grams, or a small model
mtp_drafter    or a head of the model's own for multi-token prediction
best_drafter   whichever of several is expected to be the fastest
planner        how far to run ahead
"""
