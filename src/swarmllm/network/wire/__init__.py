"""Messages, from values to bytes and back, and the streams that carry them.

protocol          versions, greeting, errors on the wire; the names that client and server import
messages          headers of the messages, checked field by field
frames            a message as bytes and back, without I/O: kinds of messages, and how large each may be
tensor_codec      tensors as the payload of a message
compression       hidden states in 8 bits
stream            messages to and from one peer, with signs of life
outbox            messages on their way to the peer
inbox             messages that came from it, until they are taken
intake            how much may have come from all peers and not been taken
liveness          whether a peer still lives
adaptive_timeout  how long a silent peer is waited for
link_rate         how fast one link is
"""
