"""Speculation over a swarm: guessed tokens are sent to the servers before the last known token is back.

sampling_loop  the sampling loop of `generate()`, with guesses under way
drafters       the guesses: n-grams, a small model, the model's own head; the fastest of several
planner        how far to run ahead
"""
