"""What is measured of this server, mostly for its announcement.

throughput        how fast its blocks are
packing_speed     which way of packing is fastest here
timing            what both share
successors        how far the servers are that may come next
"""
