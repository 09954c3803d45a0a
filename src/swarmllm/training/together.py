"""An optimizer in a run of several homes.

`Together` doesn't replace `optimizer.step()`: it hooks into it, and keeps all of its own work in another thread with an
event loop. After `every` steps it sends the difference between the shared values and the own ones. The next steps go on
meanwhile. When the round has ended, the own values move by the same vector as the shared ones, plus the difference that
counted. So nothing is lost that happened in between: an own difference that came too late, the rounding of one that
came in time, and steps since then are all in the next difference.
"""

import hashlib
import json
import logging
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmllm.client.view.event_loop import EventLoop
from swarmllm.config import take_types
from swarmllm.errors import ConfigurationError, PeerUnreachableError
from swarmllm.files import create_private_file, read_text, replace_file, replaced, user_path
from swarmllm.invite import Invite, names_invite, read_invite, unpack_invites
from swarmllm.network.p2p.addresses import on_port, port_of
from swarmllm.network.p2p.identity import Identity, lock_identity
from swarmllm.training import common_texts
from swarmllm.training.differences import Floats, Rules, SharedState, quantize
from swarmllm.training.homes import saved_homes
from swarmllm.training.members import STATE_FILE, TEXTS_FILE, Members, Membership, Report, saved_state
from swarmllm.training.privacy import epsilon_of, homes_needed, with_noise
from swarmllm.training.rounds import MAX_LOSS
from swarmllm.training.trained import description

logger = logging.getLogger(__name__)

MAX_VALUES = 250_000_000
"""Most trained values. A difference must fit into one message of 256 MiB."""
INVITE_FILE, SPENT_FILE, PORT_FILE = "invite.swarm", "privacy_spent.txt", "port.txt"
MAX_HOMES_HERE = 16
"""Most directories of one run that are tried on this machine."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a home in a run. The first three must be the same in all homes."""

    outer_lr: float = Rules.outer_lr
    """Learning rate of the average of all differences. 1 and no momentum: plain averages of the values."""
    outer_momentum: float = Rules.outer_momentum
    """Nesterov momentum of the averages. Both defaults are DiLoCo's. For runs of few rounds, 0.8 and a momentum of 0.5
    are better (`benchmarks/together.py`)."""
    trim: float = 0.0
    """Share of the largest and of the smallest differences of each value to leave out: 0.25 of 4 homes leaves out one
    each. Lies count less then, and so does what only one home has seen."""
    common_texts: tuple[str, ...] = ()
    """Texts on which all homes measure the loss of their own values and of the shared ones, once a round. The first
    home names them, and the others get them from it. At most 64 KiB, best a few thousand tokens. Nobody should train on
    them."""
    wait_for: int = 1
    """Homes that must be there before this one begins. When it begins again it waits for at most two minutes, as the
    others may have ended."""
    patience_s: float = 120.0
    """Longest time that a round waits for slower homes, from its first difference. What they have learned counts in the
    next round."""
    in_background: bool = True
    """False: wait for the end of each round before the next step."""
    noise_multiplier: float = 0.0
    """Noise on each sent difference, in multiples of `clip_norm`. 0: none."""
    clip_norm: float = 1.0
    """With noise: the largest norm of a sent difference."""
    name: str = ""
    """Name of this home in logs. Empty: the host's name."""
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses to listen on."""
    announce_maddrs: tuple[str, ...] | None = None
    """Addresses for others, if they differ."""

    def __post_init__(self) -> None:
        take_types(self)
        ranges = {
            "outer_lr": (0 < self.outer_lr <= 10, "above 0, and at most 10"),
            "outer_momentum": (0 <= self.outer_momentum < 1, "at least 0, and below 1"),
            "trim": (0 <= self.trim < 0.5, "at least 0, and below 0.5"),
            "wait_for": (1 <= self.wait_for <= MAX_HOMES_HERE, f"1 to {MAX_HOMES_HERE} homes"),
            "patience_s": (self.patience_s > 0, "above 0"),
            "noise_multiplier": (0 <= self.noise_multiplier < math.inf, "at least 0, and finite"),
            "clip_norm": (0 < self.clip_norm < math.inf, "above 0, and finite"),
        }
        for name, (is_right, words) in ranges.items():
            if not is_right:
                raise ConfigurationError(f"{name} must be {words}, not {getattr(self, name)}")


class Together:
    """A run as a context manager. Inside, `optimizer.step()` takes part in it.

    `run` is a name, which founds a run or goes on with it, or the invite that another home printed (the word, or its
    file). The trained values are all parameters of the optimizer. At the beginning they become those of the run, and at
    the end as well. `loss_of` returns the loss of the model, with the values that it has at the moment, on the run's
    common texts (`RunSettings.common_texts`): `functools.partial(text_loss, model, tokenizer)`. Without it, this home
    measures none.
    `directory` holds this home's identity, the log of rounds, and the newest shared state, from which it goes on if
    nobody else is there. With `model` (the one with the adapter) homes that train another adapter or base model refuse
    each other. Without it they compare shapes only. Without `initial_peers` the run has a small swarm of its own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: str | Path,
        every: int = 50,
        *,
        directory: str | Path | None = None,
        initial_peers: Sequence[str] = (),
        settings: RunSettings | None = None,
        loss_of: Callable[[Sequence[str]], float] | None = None,
        model: Any = None,
    ) -> None:
        if not str(run):
            raise ConfigurationError("the run has no name: give one, or the invite of another home")
        if not np.issubdtype(type(every), np.integer) or every < 1:
            raise ConfigurationError(f"every must be 1 step or more, not {every!r}")
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper calls no hooks
        self.optimizer, self.every, self.settings = optimizer, every, settings or RunSettings()
        self._parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        size = sum(one.numel() for one in self._parameters)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ConfigurationError("a home trains in one process: begin without torch.distributed")
        if not 0 < size <= MAX_VALUES:
            raise ConfigurationError(f"{size} trained values: a run needs 1 to {MAX_VALUES}, so train an adapter")
        if (needed := homes_needed(size, self.settings.noise_multiplier)) > MAX_HOMES_HERE:
            text = "noise_multiplier=%g drowns %d trained values: only %.0f homes would have as little noise as signal"
            logger.warning(text, self.settings.noise_multiplier, size, needed)
        self._trained = description(optimizer, model)
        if not self._trained:
            logger.warning("homes compare shapes only: give Together the model, and they see if they train the same")
        self._run, self._chosen_directory = str(run), directory
        self._peers = (initial_peers,) if isinstance(initial_peers, str) else tuple(initial_peers)
        self._loop: EventLoop | None = None
        self._members: Members | None = None
        self._shared: SharedState | None = None
        self._sent: tuple[int, Floats] | None = None
        """Round and values of the own difference, until that round is over."""
        self._loss_of, self._texts = loss_of, tuple[str, ...]()
        self.shared_loss: float | None = None
        """Loss of the newest shared values on the common texts, measured here."""
        self.own_loss: float | None = None
        """Loss of this home's values on them, before its last difference."""
        self._steps = self._tokens = 0
        self._losses: list[float] = []
        self._hook: Any = None
        self._spent = 0.0
        """The privacy budget that differences have used up (`training/privacy`), also before this process."""
        self.directory: Path | None = None
        self.invite = ""
        """An invite to the run, for other homes. Everybody who has it can take part."""

    # Beginning and end

    def __enter__(self) -> Self:
        invite = read_invite(self._run) if names_invite(self._run) else None
        if invite is not None and (invite.run is None or invite.run_key is None):
            raise ConfigurationError(
                "this invite is to a swarm, not to a run: take the one that a home of the run printed"
            )
        name = self._run if invite is None else str(invite.run)
        given, _ = unpack_invites(self._peers)
        peers = tuple(dict.fromkeys([*given, *(invite.initial_peers if invite else ())]))
        self.directory, own = self._home_directory(name)
        key = _run_key(self.directory, invite)
        size = sum(one.numel() for one in self._parameters)
        saved = saved_state(self.directory, size)
        spent = self.directory / SPENT_FILE
        self._spent = float(read_text(spent)) if spent.exists() else 0.0
        rules = Rules(self.settings.outer_lr, self.settings.outer_momentum, self.settings.trim)
        me = Membership(
            run=key,
            own=own,
            name=(self.settings.name or socket.gethostname())[:64],
            shapes=self._shapes(),
            trained=self._trained,
            rules=rules,
            texts=self._known_texts(self.directory),
            directory=self.directory,
            patience_s=self.settings.patience_s,
            vote_s=min(10.0, self.settings.patience_s),
        )
        self._loop = EventLoop("swarmllm-together")
        self._members = Members(me, saved or SharedState.initial(self._flat()), self._loop.spawn)
        self._loop.on_close.append(self._members.close)
        try:
            self._loop.run_coroutine(self._begin(peers, name, key, resumes=saved is not None))
            self._shared = self._members.state
            self._write(self._shared.values)
            self.shared_loss = self._measured()
        except BaseException:
            self._loop.close()
            raise
        self._hook = self.optimizer.register_step_post_hook(lambda *_: self._after_step())
        return self

    async def _begin(self, peers: tuple[str, ...], name: str, key: Identity, *, resumes: bool) -> None:
        members = self._the_members
        assert self.directory is not None
        noted = self.directory / PORT_FILE
        port = int(read_text(noted)) if noted.exists() and read_text(noted).strip().isdecimal() else None
        network = {
            "host_maddrs": on_port(self.settings.host_maddrs, port),  # invites that were given before stay right
            "announce_maddrs": self.settings.announce_maddrs,
            "identity_path": self.directory / "identity.key",
            "reachability": "auto",
        }
        met = saved_homes(self.directory)
        try:
            await members.start(initial_peers=tuple(dict.fromkeys([*peers, *met])), **network)
        except PeerUnreachableError as error:
            if not resumes:
                raise
            logger.warning("no other home can be reached, so this one looks for them, and goes on alone: %s", error)
            await members.start(**network)
            members.peer.join_by([*peers, *met])
        if (port := port_of(members.peer.addrs)) is not None:
            replace_file(noted, f"{port}\n")
        secret = key.key.private_bytes_raw().hex()
        ways = tuple(dict.fromkeys([*members.peer.join_maddrs, *peers]))[:64]
        self.invite = str(Invite(initial_peers=ways, run=name, run_key=secret))
        path = self.directory / INVITE_FILE
        path.unlink(missing_ok=True)
        create_private_file(path, self.invite.encode())
        logger.info("other homes join this run with the invite in %s", path)
        await members.join(self.settings.wait_for, path, resumes=resumes)
        await members.trains(True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Leave the run at once; harmless when called twice."""
        if self._hook is not None:
            self._hook.remove()
        if self._loop is not None:
            self._loop.close()

    def finish(self) -> None:
        """Send the last steps, wait for the end of that round, and take the shared values: the usual end of `with`."""
        self._take_news()
        if self._sent is not None:
            self._wait_for_news()
        while self._steps and not self._send():
            self._wait_for_news()
        if self._sent is not None:
            self._wait_for_news()
        self._the_loop.run_coroutine(self._the_members.leave())
        self._take_news()
        assert self._shared is not None
        self._write(self._shared.values)
        if self.shared_loss is not None:
            self._the_members.note_end(self.shared_loss)

    # Training

    def count(self, tokens: int, loss: float | None = None) -> None:
        """Say what a step was: its tokens, and its loss. Others see sums and means of them.

        Raises:
            ConfigurationError: no step has less than 0 tokens.
        """
        if int(tokens) < 0:
            raise ConfigurationError(f"a step has 0 tokens or more, not {int(tokens)}")
        self._tokens += int(tokens)
        if loss is not None:
            self._losses.append(float(loss))

    @property
    def round(self) -> int:
        """Number of the round in which this home is."""
        return 0 if self._shared is None else self._shared.round

    @property
    def num_homes(self) -> int:
        """Homes that are there now, with this one."""
        return self._the_members.num_members

    @property
    def sent_bytes(self) -> int:
        return self._the_members.counts.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._the_members.counts.received_bytes

    def epsilon(self, delta: float = 1e-5) -> float:
        """The privacy that all differences sent so far leave to this home's data (`training/privacy`)."""
        return epsilon_of(delta, self._spent)

    def _after_step(self) -> None:
        self._steps += 1
        self._take_news()
        if self._steps < self.every:
            return
        while self._sent is not None or not self._send():
            self._wait_for_news()
        if not self.settings.in_background:
            self._wait_for_news()

    def _take_news(self) -> None:
        """If there is a newer shared state, move the own values by what has changed."""
        before, state = self._shared, self._the_members.state
        assert before is not None
        if state is before:
            return
        with torch.no_grad():
            move = state.values - before.values
            if self._sent is not None and state.counted.get(self._the_members.me.own.peer_id) == self._sent[0]:
                move += self._sent[1]
            own = self._flat() + move
            self._shared, self._sent = state, None
            try:
                if self._loss_of is not None:
                    self._write(state.values)
                    self.shared_loss = self._measured()
            finally:  # the own values move once, even if servers don't answer now
                self._write(own)

    def _wait_for_news(self) -> None:
        assert self._shared is not None
        self._the_loop.run_coroutine(self._the_members.round_after(self._shared))
        self._take_news()

    def _send(self) -> bool:
        """Offer the own difference. False: wait for news first."""
        shared, own = self._shared, self._flat()
        assert shared is not None
        true = shared.values - own
        if not np.isfinite(true).all():
            logger.error("a trained value is no finite number any more: this home goes on from the shared values")
            self._write(shared.values)
            self.optimizer.state.clear()
            true = np.zeros_like(true)
        noise = self.settings.noise_multiplier
        self._spend(noise)
        if noise:
            difference = quantize(with_noise(true, self.settings.clip_norm, noise, np.random.default_rng()))
        else:
            difference = quantize(true)
        is_sent = self._the_loop.run_coroutine(self._the_members.offer(difference, shared, self._report()))
        if not is_sent:
            return False
        # With noise, the whole true difference is forgotten, or the next one would undo the noise of this one.
        self._sent = shared.round, true if noise else difference.values()
        self._steps, self._tokens, self._losses = 0, 0, []
        return True

    def _report(self) -> Report:
        """Claims for the others. With noise, none may come from the own values, which would undo the noise."""
        if self.settings.noise_multiplier:
            return Report(tokens=self._tokens, shared_loss=self.shared_loss)
        self.own_loss = self._measured()
        loss = _told(sum(self._losses) / len(self._losses)) if self._losses else None
        return Report(tokens=self._tokens, loss=loss, own_loss=self.own_loss, shared_loss=self.shared_loss)

    def _measured(self) -> float | None:
        """The loss of the values that the model has now, on the common texts."""
        if self._loss_of is None:
            return None
        if not self._texts:  # they may come after this home
            self._keep_texts(self._the_members.exchange.texts)
        if not self._texts:
            return None
        return _told(float(self._loss_of(self._texts)))

    def _spend(self, noise_multiplier: float) -> None:
        """Note, before it is sent, that a difference takes a part of the budget; without noise, all of it."""
        assert self.directory is not None
        self._spent += 1 / noise_multiplier**2 if noise_multiplier else math.inf
        replace_file(self.directory / SPENT_FILE, repr(self._spent))

    # Values

    def _flat(self) -> Floats:
        """The own values, `[size]`."""
        flat = [one.detach().to("cpu", torch.float32).reshape(-1) for one in self._parameters]
        values: Floats = torch.cat(flat).numpy()
        return values

    @torch.no_grad()
    def _write(self, values: Floats) -> None:
        start = 0
        for one in self._parameters:
            part = torch.from_numpy(np.ascontiguousarray(values[start : start + one.numel()]))
            one.copy_(part.reshape(one.shape))
            start += one.numel()

    def _shapes(self) -> str:
        shapes = [list(one.shape) for one in self._parameters]
        return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()

    # What this home keeps

    def _known_texts(self, directory: Path) -> bytes:
        """The common texts of the settings, or those that the directory has."""
        texts, path = common_texts.packed(self.settings.common_texts), directory / TEXTS_FILE
        if texts and self._loss_of is None:
            raise ConfigurationError("common texts need loss_of: give partial(text_loss, model, tokenizer)")
        kept = path.read_bytes() if path.exists() else b""
        if texts and kept and texts != kept:
            raise ConfigurationError(f"the run in {directory} has other common texts: give another directory")
        if texts and not kept and (directory / STATE_FILE).exists():
            raise ConfigurationError(f"the run in {directory} began without common texts: give another directory")
        return texts or kept

    def _keep_texts(self, data: bytes) -> None:
        assert self.directory is not None
        if data:
            with replaced(self.directory / TEXTS_FILE) as path:
                path.write_bytes(data)
            self._texts = common_texts.unpacked(data, str(common_texts.digest(data)))

    def _home_directory(self, name: str) -> tuple[Path, Identity]:
        """The directory of this home, and its identity. Without a chosen one, homes of one machine get one each."""
        chosen = self._chosen_directory
        first = user_path(chosen) if chosen is not None else Path("runs", f"together-{_file_name(name)}")
        names = [first, *(first.with_name(f"{first.name}-{number}") for number in range(2, MAX_HOMES_HERE + 1))]
        for directory in names if chosen is None else [first]:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(f"can't make the directory of this home: {error}") from None
            path = directory / "identity.key"
            identity = Identity.load_or_create(path)
            if not _is_locked(path):
                return directory, identity
            if chosen is not None:
                raise ConfigurationError(f"another home uses {directory} now: give each home a directory of its own")
        raise ConfigurationError(f"{MAX_HOMES_HERE} homes of the run {name} are on this machine already")

    @property
    def _the_loop(self) -> EventLoop:
        if self._loop is None:
            raise ConfigurationError("the run has not begun: use `with Together(...)`")
        return self._loop

    @property
    def _the_members(self) -> Members:
        if self._members is None:
            raise ConfigurationError("the run has not begun: use `with Together(...)`")
        return self._members


def _told(loss: float) -> float | None:
    """The loss as others may hear it; None: it is no finite number, or too large."""
    return loss if abs(loss) <= MAX_LOSS else None


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in name)[:64]


def _is_locked(path: Path) -> bool:
    """True if another process uses this identity."""
    try:
        os.close(lock_identity(path))
    except ConfigurationError:
        return True
    return False


def _run_key(directory: Path, invite: Invite | None) -> Identity:
    """The key of the run: from the invite, or the one in the directory, or a new one.

    Raises:
        ConfigurationError: the invite is damaged, or the directory belongs to another run.
    """
    path = directory / "run.key"
    if invite is None:
        return Identity.load_or_create(path)
    try:
        key = Identity.of_key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(str(invite.run_key))))
    except ValueError:
        raise ConfigurationError("the run's key in this invite is damaged: copy the whole word") from None
    if not path.exists():
        key.write(path)
    elif Identity.load(path).peer_id != key.peer_id:
        raise ConfigurationError(f"{directory} belongs to another run: give another directory")
    return key
