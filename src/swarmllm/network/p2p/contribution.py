"""The proof that a client belongs to somebody who serves: a server's signature of that client's peer id.

Client and server are different peers, so the client needs the file with the server's key. Nobody else can use the
proof, as the stream on which it is shown says whose it is; and it is worth something only while the server serves.
"""

from swarmllm.network.p2p.identity import Identity, verify
from swarmllm.network.wire.protocol import Contribution


def contribution(server: Identity, client: str) -> Contribution:
    """The proof for the client of that peer id."""
    return Contribution(server=server.peer_id, signature=server.sign(_statement(server.peer_id, client)))


def is_genuine(shown: Contribution, client: str) -> bool:
    """Whether that server has signed it, for this client."""
    return verify(shown.server, shown.signature, _statement(shown.server, client))


def _statement(server: str, client: str) -> bytes:
    # The first words tell it from everything else that servers sign.
    return f"swarmllm: {server} serves, and {client} is a client of its owner".encode()
