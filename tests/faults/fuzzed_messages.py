"""Messages of a hostile client: valid conversations made wrong in some places, drawn from a seed. Used by the fuzzers.

Fields, types, sizes, tensors, order and ids are wrong; that of bytes and streams, `test_fuzzed_conversations` adds.
"""

import gc
import random
from collections.abc import Callable
from typing import Any

import msgpack
import psutil
import torch
from hostile import MALLORY, SERVER, open_header, step_header
from torch import Tensor

from swarmllm.data_structures import Span
from swarmllm.machine_memory import return_free_memory
from swarmllm.models.boundary.block_inputs import TENSOR_NAMES
from swarmllm.network.wire.compression import compress
from swarmllm.network.wire.frames import FORMAT, MAGIC, PREFIX
from swarmllm.network.wire.protocol import MessageType
from swarmllm.network.wire.tensor_codec import DTYPES, encode_tensors

Sent = tuple[MessageType, dict[str, Any], bytes]

NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 64, 255, 1 << 16, (1 << 24) - 1, 1 << 24, 1 << 31, (1 << 63) - 1, (1 << 64) - 1)
ODD_VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *(-number for number in NUMBERS[1:-1]),
    *(
        None,
        True,
        False,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "x" * 32,
        "\x00" * 32,
        "ü" * 32,
        "x" * 20_000,
        b"",
        b"\xff" * 32,
    ),
    *([], [0], [-1], [1 << 40] * 3, [[]], {}, {"a": {}}, [["hidden_states", "float32", [1, 1], 4]] * 40),
)


class Conversation:
    """The messages of a client on one stream, some of which are wrong."""

    def __init__(self, seed: int, stolen: list[str], hidden_size: int = 16) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sessions = [f"{self.random.getrandbits(128):032x}" for _ in range(2)]
        if stolen and self.random.random() < 0.1:
            self.sessions[1] = self.random.choice(stolen)
        self.hidden_size = hidden_size
        self.stolen = stolen
        """Sessions of other clients."""

    def messages(self) -> list[Sent]:
        """About twenty messages, most of them wrong somewhere."""
        valid = self._valid()
        if self.random.random() < 0.3:
            self.random.shuffle(valid)
        elif self.random.random() < 0.3:
            valid = self.random.choices(valid, k=len(valid))
        wrong = 0.7 if self.random.random() < 0.7 else 0.15  # sometimes far into a session before it goes wrong
        return [self.encode(*(self.wrong(*one) if self._chance(one[0], wrong) else one)) for one in valid]

    def _chance(self, kind: MessageType, wrong: float) -> bool:
        """Sessions are opened rightly most of the time, since most of the others need one."""
        return self.random.random() < wrong * (0.1 if kind is MessageType.OPEN else 1)

    def _valid(self) -> list[tuple[MessageType, dict[str, Any], dict[str, Tensor]]]:
        first, second = self.sessions
        batch = self.random.choice((1, 1, 2, 3))
        size = self.hidden_size
        prompt, token = self._floats(batch, self.random.randint(2, 9), size), self._floats(batch, 1, size)
        length = prompt.shape[1]
        rows = [self.random.randrange(batch) for _ in range(batch)]
        successor = {"peer_id": SERVER, "session": second, "token": second[::-1]}
        link = (MessageType.LINK, {"id": 7, "session": first, "epoch": 0, "successor": successor}, {})
        unlink = (MessageType.LINK, {"id": 8, "session": first, "epoch": 1, "successor": None}, {})
        forward = {"id": 9, "start": 0, "end": 2, "batch_size": batch, "seq_len": length}
        mask = torch.ones(batch, length, dtype=torch.int64)
        replay = {"id": 10, "session": first, "epoch": 1, "length": length, "replay_hops": 1, "rows": 1}
        in_steps = {"id": 17, "steps": [0, length], "cuts": [1, self.random.randint(0, 9)]}
        rebuilt = {"epoch": 2, "rows": 1, "replay_hops": 1, "whole": True, "pieces": [[0, 1, [1, length - 1]]]}
        prefill = step_header(first, 0, prompt)
        patch = {"block": 0, "path": "self_attn.q_proj", "kind": "lora", "shapes": [[2, size], [size, 2]]}
        adapter = (MessageType.ADAPTER, {"id": 14, "handle": 5, "patches": [patch]}, {"values": self._floats(4 * size)})
        return [
            (MessageType.OPEN, open_header(first, Span(0, 1), batch_size=batch), {}),
            (MessageType.OPEN, open_header(second, Span(1, 2), batch_size=batch), {}),
            *([link] if self.random.random() < 0.5 else []),
            (MessageType.STEP, prefill, {"hidden_states": prompt}),
            (MessageType.STEP, step_header(first, length, token), {"hidden_states": token}),
            (
                MessageType.STEP,
                step_header(first, length + 1, token, rows=1, batch_index=rows),
                {"hidden_states": token},
            ),
            (MessageType.STEP, step_header(second, 0, prompt), {"hidden_states": prompt, "attention_mask": mask}),
            *([unlink] if self.random.random() < 0.5 else []),
            (MessageType.REPLAY, replay, {}),
            (MessageType.REPLAY, replay | in_steps, {}),
            (MessageType.STEP, step_header(first, length, token, epoch=1, rows=1), {"hidden_states": token}),
            (MessageType.FORWARD, forward, {"hidden_states": prompt, "attention_mask": mask}),
            (MessageType.BACKWARD, forward, {"hidden_states": prompt, "grad_outputs": prompt}),
            (
                MessageType.FORWARD,
                forward | {"id": 12, "end": 1, "target": {"peer_id": SERVER, "token": first}},
                {"hidden_states": prompt},
            ),
            (MessageType.FORWARD, forward | {"id": 13, "start": 1, "source": {"peer_id": SERVER, "token": first}}, {}),
            (MessageType.PUSH, {"token": first}, {"hidden_states": prompt}),
            *([adapter] if self.random.random() < 0.5 else []),
            (MessageType.FORWARD, forward | {"id": 15, "adapter": 5, "keep": True}, {"hidden_states": prompt}),
            (MessageType.BACKWARD, forward | {"id": 16, "forward": 15}, {"grad_outputs": prompt}),
            (MessageType.ATTACH, {"id": 11, "session": second, "token": second[::-1]}, {}),
            (MessageType.STEP, step_header(second, length, token), {"hidden_states": token}),
            (MessageType.STEP, step_header(first, 0, prompt, epoch=2, rows=1), {"hidden_states": prompt}),
            (MessageType.STEP, step_header(first, 0, prompt, **rebuilt), {"hidden_states": prompt}),
        ]

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def wrong(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            change: Callable[..., Any] = self.random.choice(
                (
                    self._field,
                    self._field,
                    self._inner_field,
                    self._small_number,
                    self._id,
                    self._kind,
                    self._tensor,
                    self._tensor,
                    self._beside,
                )
            )
            kind, header, tensors = change(kind, dict(header), dict(tensors))
        return kind, header, tensors

    def _field(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        name = self.random.choice([*header, "tensors", "timings", "batch_index", "surprise"])
        if self.random.random() < 0.15:
            header.pop(name, None)
        else:
            header[name] = self.random.choice(ODD_VALUES)
        return kind, header, tensors

    def _inner_field(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """A wrong object: a successor, a patch or the like."""
        names = [name for name, value in header.items() if isinstance(value, dict | list) and value]
        if not names:
            return self._field(kind, header, tensors)
        name = self.random.choice(names)
        header[name] = self._changed_within(header[name])
        return kind, header, tensors

    def _changed_within(self, value: Any) -> Any:
        if not isinstance(value, dict | list) or not value or self.random.random() < 0.3:
            return self.random.choice(ODD_VALUES)
        changed: Any = dict(value) if isinstance(value, dict) else list(value)
        key = self.random.choice(list(value)) if isinstance(value, dict) else self.random.randrange(len(value))
        changed[key] = self._changed_within(changed[key])
        return changed

    def _small_number(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """Still of the right type, and near the right value."""
        names = [name for name, value in header.items() if type(value) is int]
        if names:
            name = self.random.choice([*names, "replay_hops", "rows"])
            near = (header[name] if name in names else 0) + self.random.randint(-3, 3)
            header[name] = min(max(0, near), NUMBERS[-1])  # msgpack has no larger ones
        if self.random.random() < 0.3:
            header["batch_index"] = [self.random.randrange(5) for _ in range(self.random.randrange(5))]
        return kind, header, tensors

    def _id(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        header["session"] = self.random.choice([*self.sessions, *self.stolen])
        if self.random.random() < 0.3:
            header["token"] = self.random.choice([*self.sessions, *self.stolen])
        if self.random.random() < 0.3:
            peer_id = self.random.choice((SERVER, MALLORY, "1" * 50))
            session = self.random.choice([*self.sessions, *self.stolen])
            header["successor"] = {"peer_id": peer_id, "session": session, "token": session[::-1]}
        return kind, header, tensors

    def _kind(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        ends_the_stream = (MessageType.PING, MessageType.PONG, MessageType.ERROR) if tensors else ()
        kinds = [kind for kind in MessageType if kind is not MessageType.CONTINUE and kind not in ends_the_stream]
        return self.random.choice(kinds), header, tensors

    def _tensor(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        if not tensors:
            return self._field(kind, header, tensors)
        name = self.random.choice(list(tensors))
        tensor = tensors[name]
        match self.random.randrange(8):
            case 0:
                tensor = tensor.to(self.random.choice(list(DTYPES.values())))
            case 1:
                tensor = tensor.float() * self.random.choice((float("nan"), float("inf"), 1e30, -0.0))
            case 2:
                tensor = tensor.unsqueeze(self.random.randint(0, tensor.ndim))
            case 3:
                tensor = tensor.flatten() if self.random.random() < 0.5 else tensor.flatten()[:0]
            case 4:
                axis = self.random.randrange(tensor.ndim) if tensor.ndim else 0
                tensor = torch.cat([tensor, tensor], dim=axis) if tensor.ndim else tensor
            case 5:
                del tensors[name]
                return kind, header, tensors
            case 6:
                del tensors[name]
                name = self.random.choice(("hidden_state", *TENSOR_NAMES, "grad_outputs", "x" * 100, ""))
            case 7 if tensor.ndim:
                axis = self.random.randrange(tensor.ndim)
                tensor = tensor.narrow(axis, 0, self.random.randint(0, min(1, tensor.shape[axis])))
        tensors[name] = tensor
        return kind, header, tensors

    def _beside(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """One more tensor, of a name that blocks take, that fits nothing."""
        shape = [self.random.choice((0, 1, 1, 2, 3, 5, 16, 40)) for _ in range(self.random.randint(0, 4))]
        dtype = self.random.choice(list(DTYPES.values()))
        tensors[self.random.choice(TENSOR_NAMES[1:])] = (self._floats(*shape) * 100).to(dtype)
        header["ones_mask"] = self.random.random() < 0.5
        return kind, header, tensors

    def encode(self, kind: MessageType, header: dict[str, Any], tensors: dict[str, Tensor]) -> Sent:
        packed = {name: compress(tensor) for name, tensor in tensors.items() if self.random.random() < 0.3}
        descriptors, chunks = encode_tensors({name: packed.get(name) or tensor for name, tensor in tensors.items()})
        payload = b"".join(chunks)
        if packed and self.random.random() < 0.1:
            payload = self.random.randbytes(len(payload))
        if header.get("tensors") == () or (tensors and "tensors" not in header):
            header = header | {"tensors": descriptors}
        match self.random.randrange(40):
            case 0:
                payload = payload[: self.random.randint(0, len(payload))]
            case 1:
                payload += bytes(self.random.randint(1, 40))
            case 2 if descriptors:
                broken: list[Any] = [list(descriptor) for descriptor in descriptors]
                self.random.choice(broken)[self.random.randrange(4)] = self.random.choice(ODD_VALUES)
                header = header | {"tensors": broken}
        return kind, header, payload


def wire(kind: MessageType, header: dict[str, Any], payload: bytes = b"", *, flags: int = 0) -> bytes:
    """One frame as it travels, whatever its size: `encode_message` sends nothing that is over a cap."""
    packed = msgpack.packb(header)
    return PREFIX.pack(MAGIC, FORMAT, kind, flags, len(packed), len(payload), len(payload)) + packed + payload


def used_memory() -> int:
    """Bytes that this process really uses, without what its allocator keeps for later."""
    gc.collect()
    return_free_memory()
    return int(psutil.Process().memory_info().rss)
