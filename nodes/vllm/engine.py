"""The engine and its thread: an asyncio loop on which vLLM's front end lives, apart from the loop of the node's
sockets."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

MEANWHILE_S = 0.25

C = TypeVar("C")


class EngineThread(Generic[C]):
    """An engine on its thread: `with EngineThread(build, close) as engine:`; `build` makes the client on the thread,
    `close` ends it there. Entering blocks until `engine.client` is there, which may take minutes; an exception of
    `build` is raised there, and `meanwhile` is called until then, each MEANWHILE_S."""

    def __init__(
        self,
        build: Callable[[], Coroutine[Any, Any, C]],
        close: Callable[[C], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._close = close
        self._meanwhile = meanwhile
        self._loop = asyncio.new_event_loop()
        self._built: Future[C] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)  # it may hang while it loads

    def __enter__(self) -> EngineThread[C]:
        self._thread.start()
        while not wait((self._built,), MEANWHILE_S).done:  # a signal is handled here
            self._meanwhile()
        self.client = self._built.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread, soon; this returns at once. Any thread may call it."""
        self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # children inherit it: Ctrl-C is for the node, to drain
        asyncio.set_event_loop(self._loop)
        try:
            client = self._loop.run_until_complete(self._build())
        except BaseException as error:
            self._built.set_exception(error)
        else:
            self._built.set_result(client)
            self._loop.run_forever()
            self._close(client)
        finally:
            self._loop.run_until_complete(self._end_tasks())
            self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
