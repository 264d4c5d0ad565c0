"""A TCP proxy between a client and a broker that adds latency, limits bandwidth, cuts connections or drops all data.

Used where netem needs privileges that a container does not have.
"""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from edge_fl.wire.endpoint import Endpoint

READ_BYTES = 4096


class Proxy:
    """Forwards to `target`. `latency_s` delays every read, `bytes_per_s` (0: unlimited) is the bandwidth; both may change at any time."""

    def __init__(self, target: Endpoint, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self.target, self.latency_s, self.bytes_per_s = target, latency_s, bytes_per_s
        self.forwarded_bytes = self.accepted = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._forwarding = threading.Event()
        self._forwarding.set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def endpoint(self) -> Endpoint:
        """The address for clients."""
        return replace(self.target, host="127.0.0.1", port=self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Abort every connection."""
        self._await(self._abort_all())

    def drop_data(self) -> None:
        """Drop all data without closing connections, which are then half-open."""
        self._forwarding.clear()

    def pause(self) -> None:
        """Keep all data back until `resume`."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.set)

    def heal(self) -> None:
        """Abort the half-open connections and forward new ones."""
        self._forwarding.set()
        self.cut()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._await(asyncio.start_server(self._accept, "127.0.0.1", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _await(self, step: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(60)

    async def _abort_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        ending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_broker, to_broker = await asyncio.open_connection(self.target.host, self.target.port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, to_broker}
        self.accepted += 1
        try:
            await asyncio.gather(self._pump(reader, to_broker), self._pump(from_broker, writer))
        finally:
            self._open -= {writer, to_broker}
            writer.close()
            to_broker.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(READ_BYTES):
                await asyncio.sleep(
                    self.latency_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0)
                )
                await self._flowing.wait()
                if self._forwarding.is_set():
                    sink.write(data)
                    await sink.drain()
                    self.forwarded_bytes += len(data)
        except OSError:
            pass
        finally:
            sink.close()
