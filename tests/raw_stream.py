"""A stream whose transport tests hold: they see when it stands still, and do what no peer of ours would."""

import asyncio
from typing import cast

from swarmllm.network.wire.stream import FrameStream


class RawStream(FrameStream):
    """One end. Its transport writes any bytes, and stops reading and goes on; `is_reading()` says which."""

    transport: asyncio.Transport
    is_full = False
    """True while the other end reads so little that nothing more is written."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_full = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.is_full = False
