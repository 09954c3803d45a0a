"""What the swarm looks like now and in the last hour, for /swarm and /api/swarm.

swarm_watch    keeps in touch with its servers
swarm_picture  what is shown of it
swarm_history  its last hour
"""
