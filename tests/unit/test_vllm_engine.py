"""The thread that vLLM's front end lives on: start, end, and what its children inherit."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from bus.errors import StartError
from nodes.vllm.engine import EngineThread


def test_the_client_is_made_used_and_closed_on_the_thread() -> None:
    threads: list[str] = []
    done = threading.Event()

    async def build() -> str:
        threads.append(threading.current_thread().name)
        return "client"

    def closed(client: str) -> None:
        threads.append(f"{client} {threading.current_thread().name}")

    async def forever() -> None:
        done.set()
        await asyncio.Event().wait()

    with EngineThread(build, closed) as engine:
        assert engine.client == "client"
        tasks: list[asyncio.Task[None]] = []
        engine.call(lambda: tasks.append(asyncio.get_running_loop().create_task(forever())))
        assert done.wait(60)
    assert threads == ["engine", "client engine"]
    assert tasks[0].cancelled()


def test_what_goes_wrong_at_the_start_is_raised_where_it_is_waited_for() -> None:
    async def build() -> str:
        raise StartError("vLLM did not start")

    with pytest.raises(StartError, match="did not start"), EngineThread(build, print):
        raise AssertionError("unreachable")


def test_what_is_to_be_done_while_the_engine_starts_is_done() -> None:
    done = threading.Event()

    async def build() -> str:
        assert await asyncio.to_thread(done.wait, 60)
        return "client"

    with EngineThread(build, lambda client: None, done.set) as engine:
        assert engine.client == "client"


def test_ctrl_c_is_not_for_the_engines_processes() -> None:
    """A terminal sends it to all of them: the node would drain without an engine."""
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); input(); print('lives')"

    async def build() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with EngineThread(build, lambda child: None) as engine:
        child = engine.client
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.communicate("\n", timeout=120) == ("lives\n", None)
        assert child.returncode == 0
