"""A peer's identity: an Ed25519 key in libp2p's file format. The peer id contains its public half.

So every peer that knows a peer id can check that peer's signatures (`p2p/records`).

A client proves that it belongs to a contributor, who runs a server, with the server's signature of the client's peer id
(`contribution`). Client and server are different peers, so the client needs the file with the server's key. Nobody else
can use the proof, because the stream on which it is shown identifies the client. The proof counts only while the server
serves.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarmllm.errors import ConfigurationError
from swarmllm.files import create_private_file, existing_path, user_path
from swarmllm.network.wire.protocol import Contribution

# libp2p's key message: field 1 = type (1: Ed25519), field 2 = bytes. Private keys hold the public one too.
# https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
_PRIVATE_PREFIX = b"\x08\x01\x12\x40"
_PUBLIC_PREFIX = b"\x08\x01\x12\x20"
_PEER_ID_PREFIX = b"\x00\x24" + _PUBLIC_PREFIX
"""An Ed25519 peer id is the public key message as an "identity" multihash of 36 bytes."""

SIGNATURE_BYTES = 64


@dataclass(frozen=True)
class Identity:
    """The key of this peer."""

    key: Ed25519PrivateKey
    peer_id: str

    @classmethod
    def of_key(cls, key: Ed25519PrivateKey) -> "Identity":
        return cls(key, base58.b58encode(_PEER_ID_PREFIX + key.public_key().public_bytes_raw()).decode())

    @classmethod
    def generate(cls) -> "Identity":
        return cls.of_key(Ed25519PrivateKey.generate())

    def derived(self, purpose: str) -> "Identity":
        """Derive another identity for a purpose, always the same one."""
        raw = HKDF(SHA256(), 32, salt=None, info=f"swarmllm {purpose}".encode()).derive(self.key.private_bytes_raw())
        return Identity.of_key(Ed25519PrivateKey.from_private_bytes(raw))

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> "Identity":
        """Load the identity in this file. If the file doesn't exist, write a new one.

        Raises:
            ConfigurationError: the file can't be read or written, or holds something else.
        """
        path = user_path(path)
        if existing_path(path) is not None:
            return cls.load(path)
        identity = cls.generate()
        identity.write(path)
        return identity

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Identity":
        """Load the identity in this file.

        Raises:
            ConfigurationError: the file can't be read, or holds something else.
        """
        path = user_path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"the identity file {path} can't be read: {error.strerror}") from error
        if len(data) != len(_PRIVATE_PREFIX) + 64 or not data.startswith(_PRIVATE_PREFIX):
            raise ConfigurationError(f"{path} is not an Ed25519 identity of libp2p; name another file")
        return cls.of_key(Ed25519PrivateKey.from_private_bytes(data[len(_PRIVATE_PREFIX) :][:32]))

    def write(self, path: Path) -> None:
        """Write the key to a new file that only this user can read.

        Raises:
            ConfigurationError: the file exists already, or can't be written.
        """
        data = _PRIVATE_PREFIX + self.key.private_bytes_raw() + self.key.public_key().public_bytes_raw()
        try:
            create_private_file(path, data)
        except OSError as error:
            raise ConfigurationError(f"the identity file {path} can't be written: {error.strerror}") from error

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data)


def lock_identity(path: str | os.PathLike[str]) -> int:
    """Lock the file. The lock ends with this process, or when `os.close` closes the result.

    Two daemons with one peer id take each other's connections, with confusing errors.

    Raises:
        ConfigurationError: another process has it.
    """
    lock = os.open(user_path(path), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigurationError(
            f"the identity {path} is in use by another process; give each server a file of its own"
        ) from None
    return lock


def is_peer_id(peer_id: str) -> bool:
    """True if this is the peer id of an Ed25519 key."""
    return _public_key(peer_id) is not None


def verify(peer_id: str, signature: bytes, data: bytes) -> bool:
    """True if this peer signed the data."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    if not 50 <= len(peer_id) <= 54:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    # Accept only the canonical spelling, so that a peer has one id.
    if len(raw) != 38 or not raw.startswith(_PEER_ID_PREFIX) or base58.b58encode(raw).decode() != peer_id:
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(raw[len(_PEER_ID_PREFIX) :])
    except ValueError:
        return None


def contribution(server: Identity, client: str) -> Contribution:
    """Make the proof for the client with this peer id."""
    return Contribution(server=server.peer_id, signature=server.sign(_statement(server.peer_id, client)))


def is_genuine(shown: Contribution, client: str) -> bool:
    """True if the named server signed the proof, for this client."""
    return verify(shown.server, shown.signature, _statement(shown.server, client))


def _statement(server: str, client: str) -> bytes:
    # The first words tell it from everything else that servers sign.
    return f"swarmllm: {server} serves, and {client} is a client of its owner".encode()
