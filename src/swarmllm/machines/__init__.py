"""Machines that serve models together: what each offers and holds, what the swarm was told to serve, where weights are.

catalogue  models, their sizes, and their plans on some machines
records    what machines tell each other: signed commands, and the record of each machine
"""
