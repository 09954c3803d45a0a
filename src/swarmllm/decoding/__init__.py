"""Decoding that transformers lacks: speculation over a swarm.

`pace` decides how far to run ahead, `drafts` guesses, `speculation` is the loop. Called by
`client/speculative_generation`; knows models and sessions, no network.
"""
