"""Measurements for the announcement, besides those of the blocks.

successors   round trips to the servers that may come next
"""
