"""The one place that imports hivemind, and only the modules that are needed.

`import hivemind` also loads its averaging, optimizer and mixture-of-experts code, with SciPy, and prints torch's
deprecation warnings. That takes 0.46 s of processor time at each start of a command, the modules below 0.06 s
(2026-11-25, one kind of machine, an AMD EPYC). Importing later wouldn't help, because Python runs a package's
`__init__` before any of its modules. So the modules are imported without running the package's `__init__`. It runs
later, if other code in this process asks the package for a name that only `__init__` provides.
"""

# mypy: disable-error-code="import-untyped"
# ruff: noqa: E402

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

_spec = None if "hivemind" in sys.modules else importlib.util.find_spec("hivemind")
if _spec is not None:
    sys.modules["hivemind"] = importlib.util.module_from_spec(_spec)

from hivemind import hivemind_cli
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration

if _spec is not None and _spec.loader is not None:
    _package, _run = sys.modules["hivemind"], _spec.loader.exec_module

    def _run_init(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        del _package.__dict__["__getattr__"]
        _run(_package)
        return getattr(_package, attribute)

    _package.__dict__["__getattr__"] = _run_init

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole process


def p2pd_path() -> Path:
    """Path of the daemon's program, which comes with hivemind."""
    return Path(*hivemind_cli.__path__) / "p2pd"


__all__ = [
    "DHTID",
    "P2P",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
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
