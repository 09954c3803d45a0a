"""Invites: an invite is one word that contains everything needed to join a swarm.

    swarm:eyJtb2RlbCI6…        the word, printed by `swarmllm dht --invite`
    friends.swarm              a file that contains such a word

Both can be given in place of an address in `initial_peers`. An invite holds addresses of peers. It may also hold the
model, and for a private swarm its secret name and the peer ids of its members. An invite gives no rights: servers still
check the identities of clients, and clients those of servers. One kind does: the invite of `swarmllm up` holds a key
that makes its holder a member, who may tell the machines which models to serve. `config` replaces invites in
`initial_peers` by their addresses, and `command_line` takes the model from them.
"""

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swarmllm.errors import ConfigurationError
from swarmllm.files import existing_path, read_text

PREFIX = "swarm:"
FILE_SUFFIX = ".swarm"
MAX_INVITE_CHARS = 65536
MAX_ENTRIES = 256
"""Most entries of each list in an invite."""
MAX_ENTRY_CHARS = 256
_KEY = re.compile(r"[0-9a-f]{64}")

PEER_ID_PREFIX, PEER_ID_CHARS = "12D3KooW", 52
"""The first characters of every Ed25519 peer id."""
_NOT_BASE58 = re.compile(r"[^1-9A-HJ-NP-Za-km-z]")


def peer_id_problem(text: str) -> str | None:
    """Say what keeps this text from being a peer id, as the end of "it …"; None: it can be one.

    All peers of swarms have Ed25519 keys (`network/p2p/identity`), so their ids look alike. The real parser is slow to
    import.
    """
    if odd := _NOT_BASE58.search(text):
        return f"holds {odd[0]!r}, which a peer id can't have"
    if len(text) != PEER_ID_CHARS:
        return f"has {len(text)} characters instead of {PEER_ID_CHARS}"
    return None if text.startswith(PEER_ID_PREFIX) else f"doesn't begin with {PEER_ID_PREFIX}"


def require_peer_ids(owner: object, *names: str) -> None:
    """Raise ConfigurationError unless these settings are None or lists of whole peer ids.

    Another text would be equal to no peer's id, so a list would silently allow, prefer or block nobody.
    """
    for name in names:
        for text in getattr(owner, name) or ():
            if (problem := peer_id_problem(text)) is not None:
                raise ConfigurationError(
                    f"{name}: {text!r} is no peer id, which looks like {PEER_ID_PREFIX}…: it {problem}; "
                    "`swarmllm status --json` shows the whole ids of servers, and servers that refuse a client name "
                    "the client's"
                )


@dataclass(frozen=True, kw_only=True)
class Invite:
    """The contents of one invite."""

    initial_peers: tuple[str, ...]
    """Multiaddresses of peers of the swarm."""
    model: str | None = None
    """Hub id of the model, or the name of a directory that everybody has."""
    allowed_servers: tuple[str, ...] | None = None
    """Peer ids of the servers with which clients and other servers work; None = any."""
    allowed_clients: tuple[str, ...] | None = None
    """Peer ids of the clients that servers serve; None = any."""
    swarm_name: str | None = None
    """Secret name of a private swarm. The DHT keys of its servers are made from it, so only peers that know it find
    them. None = the public swarm of the model."""
    member_key: str | None = field(default=None, repr=False)
    """Private half of the swarm key of machines, in hex (`machines/records`). None = the invite makes nobody a
    member."""
    run: str | None = None
    """Name of a run of training (`training/together`)."""
    run_key: str | None = field(default=None, repr=False)
    """Its private key, in hex. Everybody who has it can take part."""

    def __str__(self) -> str:
        """The invite as one word."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        text = json.dumps(given, separators=(",", ":"), ensure_ascii=False)
        return PREFIX + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def is_invite(entry: str) -> bool:
    """True if this entry of `initial_peers` is an invite, or the name of a file that contains one."""
    return entry.startswith(PREFIX) or entry.endswith(FILE_SUFFIX)


def names_invite(word: str) -> bool:
    """The same where nothing but an invite or a plain name can stand: any file that holds an invite is one.

    Raises:
        ConfigurationError: it can only be meant as a file, and that holds none.
    """
    if is_invite(word):
        return True
    is_path = word.startswith(("/", "./", "../", "~")) or word.endswith(".txt")
    try:
        if existing_path(word) is not None:
            return bool(_word_in_file(word))
    except ConfigurationError:  # a file that holds something else, or a name that no file can have
        if is_path:
            raise
    if is_path:
        raise ConfigurationError(f"there is no file {word}, and an invite begins with {PREFIX}")
    return False


def read_invite(entry: str) -> Invite:
    """Read an invite, given as a word or as a file.

    Raises:
        ConfigurationError: the file contains no invite, the invite is damaged, or it lists peers that can't exist.
    """
    word = entry if entry.startswith(PREFIX) else _word_in_file(entry)
    try:
        if len(word) > MAX_INVITE_CHARS:
            raise ValueError("it is too long")
        fields = _unpacked(word.removeprefix(PREFIX))
        if not isinstance(fields, dict):
            raise ValueError("it is not a table of fields")
        invite = Invite(
            initial_peers=_texts(fields, "initial_peers") or (),
            model=_text(fields["model"]) if fields.get("model") is not None else None,
            allowed_servers=_texts(fields, "allowed_servers"),
            allowed_clients=_texts(fields, "allowed_clients"),
            swarm_name=_text(fields["swarm_name"]) if fields.get("swarm_name") is not None else None,
            member_key=_key(fields["member_key"]) if fields.get("member_key") is not None else None,
            run=_text(fields["run"]) if fields.get("run") is not None else None,
            run_key=_key(fields["run_key"]) if fields.get("run_key") is not None else None,
        )
    except ValueError as error:
        raise ConfigurationError(f"the invite {entry[:24]}… is damaged ({error}); copy the whole word again") from None
    try:
        require_peer_ids(invite, "allowed_servers", "allowed_clients")
    except ConfigurationError as error:  # the word is whole, so to copy it again would not help
        raise ConfigurationError(
            f"ask for a new invite instead of {entry[:24]}…, with whole peer ids: {error}"
        ) from None
    return invite


def unpack_invites(entries: Iterable[str]) -> tuple[tuple[str, ...], tuple[Invite, ...]]:
    """Replace the invites in `initial_peers` by the addresses that they hold; return (addresses, invites).

    Raises:
        ConfigurationError: one of them is damaged.
    """
    peers: list[str] = []
    invites: list[Invite] = []
    for entry in entries:
        if is_invite(entry):
            invites.append(read_invite(entry))
            peers.extend(invites[-1].initial_peers)
        else:
            peers.append(entry)
    return tuple(dict.fromkeys(peers)), tuple(invites)


def merge_allowed(lists: Iterable[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Return every peer id that is in one of these lists; None if all lists are None."""
    given = [ids for ids in lists if ids is not None]
    return tuple(dict.fromkeys(peer_id for ids in given for peer_id in ids)) if given else None


def agreed_name(invites: Iterable[Invite]) -> str | None:
    """Return the one name of a private swarm in these invites; None if no invite has a name.

    Raises:
        ConfigurationError: they name different swarms.
    """
    names = {invite.swarm_name for invite in invites if invite.swarm_name is not None}
    if len(names) > 1:
        raise ConfigurationError("these invites are to different private swarms: give only invites to one swarm")
    return names.pop() if names else None


def _unpacked(packed: str) -> Any:
    """The JSON in a word without its prefix.

    Raises:
        ValueError: there is none.
    """
    try:
        return json.loads(base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):  # of base64 and of text, too
        raise ValueError("letters are missing or changed" if packed else "nothing follows the colon") from None


def _word_in_file(path: str) -> str:
    """Return the one invite that the file contains, as a word."""
    try:
        text = read_text(path)
    except ConfigurationError as error:
        raise ConfigurationError(f"can't read the invite in {error}") from None
    found = [word for word in text.split() if word.startswith(PREFIX)]
    if len(found) != 1:
        raise ConfigurationError(
            f"{path} must hold one invite, a word that begins with {PREFIX}; it holds {len(found)}"
        )
    return found[0]


def _texts(fields: dict[str, Any], name: str) -> tuple[str, ...] | None:
    """Check a field of an invite that is a list; None if it is missing."""
    values = fields.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) > MAX_ENTRIES:
        raise ValueError(f"its {name} is not a list of at most {MAX_ENTRIES} entries")
    return tuple(map(_text, values))


def _text(value: object) -> str:
    """Check one text of an invite: printable, not too long, and not itself an invite."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= MAX_ENTRY_CHARS:
        raise ValueError("one of its entries is not text, or is too long")
    if is_invite(value):
        raise ValueError("it holds another invite")
    return value


def _key(value: object) -> str:
    """Check the private half of a key."""
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise ValueError("one of its keys is not 64 hexadecimal digits")
    return value
