"""The state directory of a machine: its keys, the newest command, and the files that survive a restart.

    identity.key   the peer id of this machine, which nobody else can read
    swarm.key      the private half of the swarm key, in the same form
    swarm.json     the name of the swarm, and if it is open to the local network
    command.json   the newest command, and the commands before it, for people
    hosted.json    blocks that this machine serves, to go on with them after a crash
    peers.json     addresses of other machines, to find them again
    speeds.json    measured speeds of this machine's devices
    page.json      address and key of the page of the running agent
    here.json      addresses and models of the swarm, for clients on this machine while the agent runs
    weights/       the store of weights (`machines/weights`)
    lock           locked while an agent runs here

All files are replaced at once, so a crash at any moment leaves the old one or the new one.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmllm.errors import ConfigurationError
from swarmllm.files import existing_path, replaced
from swarmllm.machines.records import Command
from swarmllm.network.p2p.identity import Identity

logger = logging.getLogger(__name__)

NUM_KEPT_COMMANDS = 50


class StateDirectory:
    """Reads and writes the files. Damaged files count as missing, except keys."""

    def __init__(self, path: Path) -> None:
        """Raises: ConfigurationError: it can't be made."""
        self.path = path
        self._missed: set[str] = set()
        """Files that `keep` couldn't write."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the state directory {path} can't be made ({error.strerror}): set SWARMLLM_STATE_DIR to another one"
            ) from None

    @contextmanager
    def locked(self) -> Iterator["StateDirectory"]:
        """Keep other agents away within. The lock ends with the process, too.

        Raises:
            ConfigurationError: an agent runs here already, or the directory can't be written.
        """
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"{self.path / 'lock'} can't be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(
                    "`swarmllm up` runs on this machine already: end it first (one that was installed, by `swarmllm up "
                    "--uninstall`), or give this one a directory of its own by SWARMLLM_STATE_DIR"
                ) from None
            yield self
        finally:
            os.close(lock)

    @property
    def identity_path(self) -> Path:
        return self.path / "identity.key"

    @property
    def swarm_key_path(self) -> Path:
        return self.path / "swarm.key"

    @property
    def weights_path(self) -> Path:
        return self.path / "weights"

    def swarm_key(self) -> Identity | None:
        """The swarm key; None: this machine is in no swarm.

        Raises:
            ConfigurationError: the file is damaged.
        """
        return None if existing_path(self.swarm_key_path) is None else Identity.load(self.swarm_key_path)

    def enter_swarm(self, key: Identity, *, name: str, is_open: bool) -> None:
        """Note the swarm of which this machine is a member. What it knew about another swarm is forgotten.

        Raises:
            ConfigurationError: the files can't be written.
        """
        before = self.swarm_key()
        if before is None or before.peer_id != key.peer_id:
            new = self.path / "swarm.key.new"
            try:
                new.unlink(missing_ok=True)
                key.write(new)  # while the old one is there: nobody could get that back if the disk is full
                for filename in ("command.json", "hosted.json", "peers.json"):
                    (self.path / filename).unlink(missing_ok=True)
                new.replace(self.swarm_key_path)
            except OSError as error:
                raise ConfigurationError(f"{self.path} can't be written: {error.strerror}") from None
        self.write("swarm.json", {"name": name, "open": is_open})

    def commands(self) -> list[Command]:
        """The commands that this machine has seen, the newest one last."""
        found = []
        for one in self.read("command.json", []):
            with suppress(ValidationError):
                found.append(Command.model_validate_json(json.dumps(one)))
        return found

    def note_command(self, command: Command) -> None:
        """Add a newer command."""
        kept = [*self.commands(), command][-NUM_KEPT_COMMANDS:]
        self.keep("command.json", [one.model_dump(mode="json") for one in kept])

    def read(self, filename: str, default: Any) -> Any:
        """The JSON in a file, or the default."""
        try:
            found = json.loads((self.path / filename).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return default
        return found if isinstance(found, type(default)) else default

    def write(self, filename: str, content: Any, *, secret: bool = False) -> None:
        """Replace a file by JSON.

        Raises:
            ConfigurationError: the directory can't be written, or its disk is full.
        """
        path = self.path / filename
        try:
            with replaced(path) as beside:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(beside, flags, 0o600 if secret else 0o644), "w", encoding="utf-8") as file:
                    json.dump(content, file)
        except OSError as error:
            raise ConfigurationError(f"{path} can't be written: {error.strerror}") from None

    def keep(self, filename: str, content: Any) -> bool:
        """`write` a file that only a restart misses. If the disk is full, say so once; then the machine goes on.

        Returns False if it couldn't be written.
        """
        try:
            self.write(filename, content)
        except ConfigurationError as error:
            if filename not in self._missed:
                logger.warning("%s: a restart of this machine won't know what it should hold", error)
            self._missed.add(filename)
            return False
        self._missed.discard(filename)
        return True

    def remove(self, filename: str) -> None:
        """Remove a file if it is there."""
        with suppress(OSError):
            (self.path / filename).unlink()
