"""Requests of peers.

connection    a stream: greeted, its messages taken in order, answered or refused; FORWARD and BACKWARD
input_checks  tensors compared with their headers before anything is queued
serving       the blocks served now, the sessions on them, and which clients may use them
"""
