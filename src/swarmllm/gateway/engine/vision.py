"""Pictures in chats: from data URLs to the inputs of a model, made by its own processor; and memory for them.

`chat_request` finds pictures in a request and has them read here; `generation` gives the inputs to the model. Strangers
send pictures, so their size is checked before memory is spent on them. A `Room` limits the memory of all requests
together: a request that finds too little waits in line, and callers take turns. Files with sound take their memory from
the same room.
"""

import asyncio
import base64
import binascii
import io
import re
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from swarmllm.api import ConfigurationError, total_memory_bytes
from swarmllm.gateway.engine.offered_model import load_processor
from swarmllm.gateway.errors import RETRY_AFTER_S, ApiError

if TYPE_CHECKING:
    from PIL.Image import Image

MEMORY_SHARE = 1 / 4
"""Share of this process's memory for all pictures and sounds. Assumed: answers need the rest."""


def default_bytes() -> int:
    """Default memory for pictures and sounds."""
    return int(total_memory_bytes() * MEMORY_SHARE)


class Taken:
    """An amount taken from a room; `free` gives it back. Call it in the event loop."""

    def __init__(self, room: "Room", caller: str, amount: int) -> None:
        self._room, self._caller = room, caller
        self.amount = amount

    def keep(self, amount: int) -> None:
        """Change to the amount that was really needed. It never waits: the memory is in use already."""
        self._room.change(self._caller, amount - self.amount)
        self.amount = amount

    def shrink(self, amount: int) -> None:
        """Keep at most this amount."""
        self.keep(min(self.amount, amount))

    def free(self) -> None:
        """Give all of it back. A second call does nothing."""
        self.keep(0)


class Room:
    """`size` in all, `of_one` for one caller at a time; `most` requests may wait."""

    def __init__(self, size: int, *, most: int, of_one: int | None = None) -> None:
        self.size = size
        self._of_one = size if of_one is None else of_one
        self._most = most
        self.left = size
        """Amount that nobody has."""
        self._of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        """Requests in line, by caller; the caller whose turn is next comes first."""

    async def take(self, amount: int, caller: str) -> Taken:
        """Take an amount (at most `size`) for `caller`; waits for its turn.

        Raises:
            ApiError: too many wait already.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((amount, turn))
        self._admit()
        if not turn.done() and sum(map(len, self._waiting.values())) > self._most:
            self._forget(caller, (amount, turn))
            raise ApiError(
                429,
                "too many requests with pictures or sounds wait already: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came in the same tick
                self.change(caller, -amount)
            else:
                self._forget(caller, (amount, turn))
            raise
        return Taken(self, caller, amount)

    def change(self, caller: str, amount: int) -> None:
        """Count this much more (or less) as the caller's."""
        self.left -= amount
        self._of[caller] += amount
        if not self._of[caller]:
            del self._of[caller]
        self._admit()

    def _admit(self) -> None:
        """Admit all requests whose turn it is. A caller at its own limit is passed over; one that finds too little room
        is not."""
        for caller in list(self._waiting):
            amount, turn = self._waiting[caller][0]
            if self._of[caller] and self._of[caller] + amount > self._of_one:
                continue
            if amount > self.left:
                return
            self._forget(caller, (amount, turn))
            if caller in self._waiting:
                self._waiting.move_to_end(caller)
            turn.set_result(None)
            self.change(caller, amount)  # this call admits the next one
            return

    def _forget(self, caller: str, one: tuple[int, "asyncio.Future[None]"]) -> None:
        line = self._waiting.get(caller)
        if line is not None and one in line:
            line.remove(one)
            if not line:
                del self._waiting[caller]


Result = TypeVar("Result")
MAX_PICTURES = 16
"""Pictures of one request. Assumed."""
MAX_PIXELS = 1 << 25
"""Pixels of one picture: 33 megapixels, 100 MB when unpacked; phones take 12 to 50. A file of some kilobytes can be
larger."""
MAX_RATIO = 50
"""Longer side of a picture, divided by its shorter one. Many processors scale the shorter side to some hundred pixels;
a strip of 8000 x 1 took 9 GB then (measured with CLIP's). Assumed: photographs of whole web pages have up to 20."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LEAST_BYTES = 32 << 20
"""Least memory of a picture. Some processors make a small picture large (measured: Idefics3's 17 tiles of 364²)."""
BYTES_PER_PIXEL, LARGEST_BYTES_PER_PIXEL = 5, 10
"""Memory for all pictures of a request until they have been processed, and for the largest one during that. Measured
with the processors of CLIP, Qwen2-VL, LLaVA-NeXT, Gemma 3, Pixtral and Idefics3: 5 and 9.5 at most."""
_SPACES = b" \t\r\n\f\v"
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)


class PicturePrompt(list[int]):
    """The tokens of a prompt with pictures, and the model's other inputs."""

    def __init__(self, ids: Sequence[int], inputs: dict[str, Tensor]) -> None:
        super().__init__(ids)
        self.inputs = inputs
        self.memory: Taken | None = None
        """Its part of the room for pictures, until the request has ended."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the other inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    def rows(self, count: int) -> dict[str, Tensor]:
        """The other inputs for `count` rows with this prompt: the pictures and patches of all rows, one after the
        other."""
        return {name: torch.cat([tensor] * count) for name, tensor in self.inputs.items()}


def picture_rows(prompt: Sequence[int], count: int) -> dict[str, Tensor]:
    """The inputs besides tokens for `count` rows of this prompt; empty without pictures."""
    return prompt.rows(count) if isinstance(prompt, PicturePrompt) else {}


def keep_memory(prompts: Sequence[Sequence[int]], memory: Taken, rows: int) -> None:
    """Hand the memory of these prompts' pictures over to them, as much as `rows` rows need."""
    for prompt in prompts:
        if isinstance(prompt, PicturePrompt):
            prompt.memory = memory
            memory.keep(rows * prompt.num_bytes)


def free_memory(prompts: Sequence[Sequence[int]]) -> None:
    """Free the memory of these prompts' pictures. Call it in the event loop."""
    for prompt in prompts:
        if isinstance(prompt, PicturePrompt) and prompt.memory is not None:
            prompt.memory.free()


def unpacked_bytes(urls: Sequence[str]) -> int:
    """Memory that these pictures need until they have been processed, by the sizes that their files state.

    Raises:
        ApiError: one is no picture or too large, or there are too many.
    """
    if len(urls) > MAX_PICTURES:
        raise bad_picture(f"{len(urls)} pictures are too many: {MAX_PICTURES} at most")
    pixels = [_opened(url, lambda picture: picture.width * picture.height) for url in urls]
    return sum(max(LEAST_BYTES, BYTES_PER_PIXEL * one) for one in pixels) + LARGEST_BYTES_PER_PIXEL * max(pixels)


def read_picture(url: str) -> "Image":
    """Read the picture of a data URL, in RGB.

    Raises:
        ApiError: it is none, or too large.
    """
    from PIL import ImageOps

    return _opened(url, lambda picture: ImageOps.exif_transpose(picture).convert("RGB"))


def _opened(url: str, take: "Callable[[Image], Result]") -> Result:
    """Read only the size of a picture, call `take` with it, and return its result.

    Raises:
        ApiError: it is none, or too large.
    """
    from PIL import Image, UnidentifiedImageError

    found = _DATA_URL.match(url)
    if found is None:
        raise bad_picture(
            "image_url must be a data URL, like data:image/png;base64,…: pictures are fetched from the web only by a "
            "gateway with --picture_hosts"
        )
    try:
        data = base64.b64decode(url[found.end() :].encode("ascii").translate(None, _SPACES), validate=True)
    except (binascii.Error, ValueError):
        raise bad_picture("image_url is not valid base64") from None
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check_size(picture.width, picture.height)
            return take(picture)
    except ApiError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise bad_picture(f"the picture is too large: {MAX_PIXELS} pixels at most") from None
    except UnidentifiedImageError:
        raise bad_picture(f"image_url is no picture in one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise anything on damaged files
        raise bad_picture(f"the picture is damaged: {error}") from None


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise bad_picture(f"a picture of {width} x {height} is too large: {MAX_PIXELS} pixels at most")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise bad_picture(
            f"a picture of {width} x {height} is too narrow: its longer side may be {MAX_RATIO} times the other"
        )


class PictureProcessor:
    """The processor of one vision model; loaded with the first picture."""

    def __init__(self, model: str, revision: str | None) -> None:
        """`model` is the hub id or directory."""
        self._model, self._revision = model, revision
        self._making = threading.Lock()

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoProcessor

        return load_processor(AutoProcessor, self._model, self._revision, "processor for pictures")

    @property
    def template(self) -> str:
        """The chat template for messages with pictures.

        Raises:
            ConfigurationError: there is none.
        """
        with self._making:
            found = self._loaded.chat_template
        if isinstance(found, dict):
            found = found.get("default")
        if not found:
            raise ConfigurationError(f"{self._model} has no chat template for pictures: send text alone")
        return str(found)

    def encode(self, text: str, urls: Sequence[str]) -> PicturePrompt:
        """Tokens and other inputs for the text of a conversation with one placeholder for each picture at `urls`.

        Raises:
            ApiError: a picture can't be read.
            ConfigurationError: the processor can't take the text with these pictures.
        """
        pictures = [read_picture(url) for url in urls]
        with self._making:
            processor = self._loaded
        try:
            encoded = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        except MemoryError:
            raise bad_picture("the pictures need more memory than there is: send smaller or fewer ones") from None
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise ConfigurationError(f"the model's processor can't take these messages: {error}") from None
        inputs = {name: tensor for name, tensor in encoded.items() if isinstance(tensor, Tensor)}
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        return PicturePrompt(ids, inputs)


def bad_picture(message: str) -> ApiError:
    """An error about the pictures of a chat."""
    return ApiError(400, message, param="messages", code="invalid_image")
