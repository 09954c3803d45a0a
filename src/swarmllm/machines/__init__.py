"""Machines that serve models together: what each offers and holds, what the swarm was told to serve, where weights are.

catalogue  models, their sizes, and their plans on some machines
records    what machines tell each other: signed commands, and the record of each machine
weights    the store of this machine's weights: gives pieces to members, fetches those that blocks need
downloads  the taking side: several givers at once, the hub, who of several machines fetches a piece from there
holdings   models whose pieces are on this machine
"""
