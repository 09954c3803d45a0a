"""Messages, from values to bytes and back, and the streams that carry them.

protocol      versions, greeting, errors on the wire; the names that client and server import
messages      headers of the messages, checked field by field
frames        a message as bytes and back, without I/O: kinds of messages, and how large each may be
tensor_codec  tensors as the payload of a message
compression   hidden states in 8 bits
stream        messages to and from one peer: inbox, outbox, signs of life, bounds on what all peers have sent
liveness      does a peer still live, how long is it waited for, how fast is its link
"""
