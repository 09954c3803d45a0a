"""Messages, from values to bytes and back, and the streams that carry them.

protocol      versions, greeting, errors on the wire; the names that client and server import
messages      headers of the messages, checked field by field
frames        messages as bytes and back, without I/O; kinds of messages and their largest sizes
tensor_codec  tensors as the payload of a message
compression   hidden states in 8 bits
stream        messages to and from one peer; limits on memory for what all peers have sent
liveness      detects dead peers, and measures the speed of a connection
"""
