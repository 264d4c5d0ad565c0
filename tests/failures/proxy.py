"""A TCP proxy between a client and a broker that can be slow, cut, or a black hole: what a bad link does, and no more.

There is no netem in an unprivileged container; sixty lines of asyncio on a thread of their own do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from edge_fl.wire.endpoint import Endpoint

PIECE_BYTES = 4096


class Proxy:
    """Stands before `target`. `latency_s` delays every piece, `bytes_per_s` (0: any) is the link's width; both may change at any time."""

    def __init__(self, target: Endpoint, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self.target, self.latency_s, self.bytes_per_s = target, latency_s, bytes_per_s
        self.passed_bytes = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._passing = threading.Event()
        self._passing.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        """Where its clients connect."""
        return replace(self.target, host="127.0.0.1", port=self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Ends every connection, as a lost link does once somebody notices."""
        self._do(self._cut())

    def swallow(self) -> None:
        """From now on nothing passes and nobody is told: half-open connections."""
        self._passing.clear()

    def heal(self) -> None:
        """What was swallowed is lost; new connections pass."""
        self._passing.set()
        self.cut()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._meet, "127.0.0.1", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _do(self, step: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(10)

    async def _cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        ending = asyncio.all_tasks() - {asyncio.current_task()}
        for run_id in ending:
            run_id.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_connection(self.target.host, self.target.port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, here}
        try:
            await asyncio.gather(self._pump(reader, here), self._pump(there, writer))
        finally:
            self._open -= {writer, here}
            writer.close()
            here.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(PIECE_BYTES):
                await asyncio.sleep(
                    self.latency_s + (len(piece) / self.bytes_per_s if self.bytes_per_s else 0)
                )
                if self._passing.is_set():
                    sink.write(piece)
                    await sink.drain()
                    self.passed_bytes += len(piece)
        except OSError:
            pass
        finally:
            sink.close()
