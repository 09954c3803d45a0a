"""Responses that are kept for the next request (`store`), in memory and in bounds. Used by `translated_routes`."""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from swarmllm.gateway.errors import ApiError


@dataclass(frozen=True)
class Stored:
    """A response, and what was said up to it."""

    owner: str
    """Who may read it: an API key, or without keys an address."""
    response: dict[str, Any]
    items: list[dict[str, Any]]
    """Parts of the conversation, up to the response's own."""
    num_bytes: int


class StoredResponses:
    """The one that was used longest ago is forgotten first. From any thread: long answers are written in one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    def keep(self, name: str, owner: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Unless it alone is larger than all may be."""
        num_bytes = len(json.dumps([response, items]))
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            self._stored[name] = Stored(owner, response, items, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes

    def get(self, name: str, owner: str) -> Stored:
        """Raises ApiError: there is none of this name, or no longer, or it is somebody else's."""
        with self._lock:
            found = self._stored.get(name)
            if found is not None and found.owner == owner:
                self._stored.move_to_end(name)
        if found is None or found.owner != owner:
            raise ApiError(
                404,
                f"there is no response {name[:64]!r} here (any more): send the conversation itself",
                param="previous_response_id",
                code="response_not_found",
            )
        return found

    def forget(self, name: str, owner: str) -> None:
        """Raises ApiError: as `get`."""
        self.get(name, owner)
        with self._lock:
            found = self._stored.pop(name, None)
            self._num_bytes -= 0 if found is None else found.num_bytes
