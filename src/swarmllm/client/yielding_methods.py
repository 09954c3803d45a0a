"""Methods that step back where an architecture has a module of the same name. Used by `distributed_model`."""

from collections.abc import Callable
from types import MethodType
from typing import Any


class UnlessOwn:
    """A method of ours that steps back where the architecture has a module of that name."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, model: Any, cls: type | None = None) -> Any:
        if model is None:
            return self._method
        own = model.__dict__.get("_modules", {}).get(self._method.__name__)
        return MethodType(self._method, model) if own is None else own
