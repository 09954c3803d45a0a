"""Requests of peers.

connection            a stream: greeted, its messages taken in order, answered or refused
input_checks          tensors compared with their headers before anything is queued
sessionless_requests  FORWARD and BACKWARD
serving               the blocks served now, the sessions on them, and which clients may use them
"""
