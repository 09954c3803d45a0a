"""The one place that imports hivemind, and only the parts that are used.

`import hivemind` also loads its averaging, optimizer and mixture-of-experts code, with SciPy: measured 0.3 s (0.5 s
cold) after PyTorch, against 0.08 s for the parts below. So they are imported without running the package's
`__init__`. That runs when somebody else in this process asks the package for a name that only it provides.
"""

# mypy: disable-error-code="import-untyped"
# ruff: noqa: E402

import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


def _enter_hivemind() -> ModuleSpec | None:
    """Register the package so that its submodules can be imported; None if it is imported already."""
    if "hivemind" in sys.modules:
        return None
    spec = importlib.util.find_spec("hivemind")
    if spec is None:
        raise ModuleNotFoundError("hivemind is not installed", name="hivemind")
    sys.modules["hivemind"] = importlib.util.module_from_spec(spec)
    return spec


def _run_init_on_demand(spec: ModuleSpec) -> None:
    package = sys.modules["hivemind"]

    def run_init(attribute: str) -> Any:
        if attribute.startswith("__") or spec.loader is None:
            raise AttributeError(attribute)
        del package.__dict__["__getattr__"]
        spec.loader.exec_module(package)
        return getattr(package, attribute)

    package.__dict__["__getattr__"] = run_init


_spec = _enter_hivemind()

from hivemind import hivemind_cli
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

if _spec is not None:
    _run_init_on_demand(_spec)


logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole process


def p2pd_path() -> Path:
    """The daemon's program, which comes with hivemind."""
    return Path(*hivemind_cli.__path__) / "p2pd"


__all__ = [
    "DHTID",
    "P2P",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
    "DaemonConnector",
    "DictionaryDHTValue",
    "Multiaddr",
    "P2PContext",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "ValueWithExpiration",
    "dht_pb2",
    "p2pd_path",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "write_pbmsg",
]
