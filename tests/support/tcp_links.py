"""Links between processes, as between machines: TCP ports that pass bytes on to others, and can hold them, make them
late, or reset all connections. One thread serves all of them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

HOST = "127.0.0.1"
CHUNK = 65_536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a RST


class Links:
    """`add(ends, port, target)` passes what comes at `port` on to `target`; `ends` names a link's two processes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._whole: dict[frozenset[str], asyncio.Event] = {}
        self._late_s: dict[frozenset[str], float] = {}
        self._writers: dict[frozenset[str], set[asyncio.StreamWriter]] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def add(self, ends: frozenset[str], port: int, target: int) -> None:
        self._run(self._listen(ends, port, target))

    def hold(self, ends: frozenset[str]) -> None:
        """Let bytes wait, as where packets are lost: no connection ends by it."""
        self._call(self._whole[ends].clear)

    def free(self, ends: frozenset[str]) -> None:
        self._call(self._whole[ends].set)

    def slow(self, ends: frozenset[str], late_s: float) -> None:
        self._call(lambda: self._late_s.__setitem__(ends, late_s))

    def reset(self, ends: frozenset[str]) -> None:
        """End each connection at once, with what is under way."""

        def all_of_them() -> None:
            for writer in list(self._writers[ends]):
                made: Any = writer.get_extra_info("socket")
                with suppress(OSError):
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()

        self._call(all_of_them)

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- on its thread ------------------------------------------------------------------------------------------

    async def _listen(self, ends: frozenset[str], port: int, target: int) -> None:
        if ends not in self._whole:
            self._whole[ends] = asyncio.Event()
            self._whole[ends].set()
            self._late_s[ends], self._writers[ends] = 0.0, set()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                far_reader, far_writer = await asyncio.open_connection(HOST, target)
            except OSError:
                writer.transport.abort()
                return
            self._writers[ends] |= {writer, far_writer}
            for pump in (self._pump(ends, reader, far_writer), self._pump(ends, far_reader, writer)):
                task = self._loop.create_task(pump)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self._servers.append(await asyncio.start_server(accepted, HOST, port))

    async def _pump(self, ends: frozenset[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._whole[ends].wait()
                if late_s := self._late_s[ends]:
                    await asyncio.sleep(late_s)
                writer.write(data)
                await writer.drain()
        await self._whole[ends].wait()
        self._writers[ends].discard(writer)
        with suppress(OSError):
            writer.close()

    async def _end(self) -> None:
        for listening in (each for server in self._servers for each in server.sockets):
            self._loop.remove_reader(listening)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # what was accepted gets where it is closed
            for pump in self._tasks:
                pump.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            server.close()
        for writers in self._writers.values():
            for writer in list(writers):
                writer.transport.abort()
        await asyncio.sleep(0)

    def _run(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(30.0)

    def _call(self, what: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (what(), done.set()))
        assert done.wait(30.0)
