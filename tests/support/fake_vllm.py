"""An `EngineClient` that behaves as vLLM's behind NIXL, traps included, without vLLM; and a node process over it.

Prefill keeps a prompt's KV in one of a few slots, until a decode engine has read it or the lease is over; then the slot
is used again, and whoever reads late gets another prompt's KV and no error. A decode engine that is given more than the
prompt dies where the prompt fills its blocks. Statistics come with steps alone, and are of no use in between. A request
that is waited for no more is aborted. An engine that is fed `DEADLY` is dead for good. What is being fetched from an
engine that is killed meanwhile does not come. A decode engine that keeps its KV caches (`keeps`) does as vLLM's with
`nodes.vllm.safe_pulls`: a fetch that ends after its lease, or of which no lease is said, has failed. One that is read
back, too, pins what a finished request with transfer parameters has left, in few slots again, for PIN_S or until a
prefill engine has read it; that engine computes what it could not read in time.

The "KV" is the sim engine's state after the prompt, in files of a folder that all engines share. A slow engine leaves a
file `computing`, `fetching` or `reading` there, a byte longer for each, which takes SLOW_S, or until a test leaves a
file `go` there.

    python -P -m fake_vllm ROLE BUS CONTROLLER FOLDER INSTANCE [LEASE_S [SLOW_S [keeps|reads]]]
                                                                              (PYTHONPATH=tests/support)
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import msgpack

from nodes.link.facts import RankFacts
from nodes.own.engines.sim import feed, next_token
from nodes.vllm.events import EventRelay
from nodes.vllm.runner import VllmRunner
from nodes.vllm.sampling import GRAMMARS, KNOWN, READ_UNTIL, REASONING, THINKING, UNIFIED

VOCAB = 512
DEADLY = 511
SLOTS = 4
BLOCK = 16
CAPACITY = 1600
STEP_S = 0.004
PIN_S = 5.0


class EngineDeadError(Exception):
    pass


def facts(margin_s: float = 0.5, *, prefills: bool = False, reads_back: bool = False) -> RankFacts:
    return RankFacts(
        model="like", max_context=4096, kv_capacity=CAPACITY, max_running=16, block_tokens=BLOCK, vocab_size=VOCAB,
        kv_transfer="files", kv_layout="like/1", wants_prompt=True, handle_margin_s=margin_s,
        params=(*KNOWN, *GRAMMARS, *UNIFIED, *THINKING, *REASONING, "parser:qwen3"), prefills=prefills,
        reads_back=reads_back,
    )  # fmt: skip


class FakeClient:
    """`stepped` as `nodes.vllm.versions.start` takes it; `params` and `options` of what was asked, in order."""

    def __init__(self, folder: Path, name: str, lease_s: float = 30.0, slow_s: float = 0.0) -> None:
        self.errored = False
        self.stepped: Callable[[int, float], None] = lambda index, usage: None
        self.live: dict[str, list[int]] = {}
        self.asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.salts: list[str | None] = []  # of what was asked, in order
        self.computed = 0  # prompt tokens
        self.keeps = False
        self.reads_back = False
        self.pin_s = PIN_S
        self.stored: Callable[[list[int]], None] = lambda ids: None
        self._kept: list[list[int]] = []  # token ids of requests that are over
        self._pinned: dict[int, tuple[float, Path]] = {}  # as `_held`
        self.clock = time.monotonic
        self._folder = folder / f"{name}-{time.time_ns()}"  # of this start
        self._folder.mkdir(parents=True)
        self._slow_s = slow_s
        self.alive = ""  # a file that is locked for as long as this engine's process lives
        self._lease_s = lease_s
        self._numbers = itertools.count()
        self._held: dict[int, tuple[float, Path]] = {}  # slot: when its lease ends, and what is there once it was read

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        assert "," not in request_id, "the connector lists names with commas between"
        assert request_id not in self.live
        ids = prompt["prompt_token_ids"]
        self.asked.append((sampling_params, options))
        self.salts.append(prompt.get("cache_salt"))
        self._check()
        self.live[request_id] = ids
        try:
            if DEADLY in ids:
                self.errored = True
                await asyncio.sleep(STEP_S)
            self._check()
            extra = sampling_params.get("extra_args", {}).get("kv_transfer_params", {})
            if extra.get("do_remote_decode"):
                yield await self._prefill(ids, extra)
                return
            hits = self._hits(ids)
            state = await self._pull(ids, extra) if extra.get("do_remote_prefill") else await self._compute(ids, hits)
            if state is None:
                yield _output([], "error")
                return
            tokens: list[int] = []
            async for output in self._decode(state, sampling_params, ids):
                output.num_cached_tokens = hits
                tokens += output.outputs[0].token_ids
                if self.keeps and output.outputs[0].finish_reason is not None:
                    self._kept.append([*ids, *tokens])
                    self.stored(self._kept[-1])
                    output.kv_transfer_params = self._pin(self._kept[-1]) if self.reads_back and extra else None
                yield output
        finally:
            del self.live[request_id]

    def _check(self) -> None:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")

    def _step(self) -> None:
        self.stepped(0, min(1.0, sum(map(len, self.live.values())) / CAPACITY))

    async def _take_time(self, doing: str) -> None:
        await asyncio.sleep(STEP_S)
        if not self._slow_s:
            return
        with (self._folder.parent / doing).open("a") as file:
            file.write(".")
        loop = asyncio.get_running_loop()
        end = loop.time() + self._slow_s
        while loop.time() < end and not (self._folder.parent / "go").exists():
            await asyncio.sleep(STEP_S)

    def _hits(self, ids: list[int]) -> int:
        """Tokens in whole blocks that some kept request began with; the last one of a prompt is always computed."""
        longest = 0
        for kept in self._kept:
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, kept, strict=False)))
            longest = max(longest, min(same, len(ids) - 1) // BLOCK * BLOCK)
        return longest

    async def _compute(self, ids: list[int], hits: int = 0, state: int = 0) -> int:
        await self._take_time("computing")
        self._check()
        self.computed += len(ids) - hits
        self._step()
        return int(feed(ids, state)[-1])

    def _pin(self, ids: list[int]) -> dict[str, Any] | None:
        """The handle of a finished request; None: all that may be pinned is."""
        slot = self._free_slot(self._pinned)
        if slot is None:
            return None
        read = self._folder / f"{next(self._numbers)}.read"
        path, blocks = self._folder / f"pinned-{slot}", -(-(len(ids) - 1) // BLOCK)
        path.write_text(json.dumps(feed(ids[:-1])))
        self._pinned[slot] = self.clock() + self.pin_s, read
        return {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": [list(range(blocks))],
            "remote_num_tokens": len(ids) - 1, "remote_blocks_expiry_time": time.perf_counter() + self.pin_s,
            "at": str(path), "read": str(read), "alive": self.alive,
        }  # fmt: skip

    async def _read(self, handle: dict[str, Any]) -> int | None:
        """The state after what a prefill engine reads back; None: that has failed."""
        await self._take_time("reading")
        if time.perf_counter() >= handle.get(READ_UNTIL, 0.0) or (handle["alive"] and not _locked(handle["alive"])):
            return None
        Path(handle["read"]).touch()
        blocks = len(handle["remote_block_ids"][0])
        return int(json.loads(Path(handle["at"]).read_text())[blocks * BLOCK - 1])

    async def _prefill(self, ids: list[int], extra: dict[str, Any]) -> Any:
        while (slot := self._free_slot(self._held)) is None:
            await asyncio.sleep(STEP_S)
        read = self._folder / f"{next(self._numbers)}.read"
        self._held[slot] = float("inf"), read
        count, after = 0, 0
        try:
            if extra.get("remote_block_ids") and (came := await self._read(extra)) is not None:
                count, after = extra["remote_num_tokens"], came
            state = await self._compute(ids[count:], state=after)
        except BaseException:
            del self._held[slot]
            raise
        path = self._folder / str(slot)
        path.write_text(json.dumps([state, len(ids)]))
        self._held[slot] = self.clock() + self._lease_s, read
        handle = {
            "do_remote_prefill": True, "remote_block_ids": [[slot]], "at": str(path), "read": str(read),
            "alive": self.alive,
        }  # fmt: skip
        made = _output([next_token(state, VOCAB)], "length", handle, self.clock())
        made.num_cached_tokens, made.num_cache_creation_tokens = count, len(ids) // BLOCK * BLOCK - count
        return made

    def _free_slot(self, used: dict[int, tuple[float, Path]]) -> int | None:
        for slot, (until, read) in list(used.items()):
            if self.clock() >= until or read.exists():
                del used[slot]
        return next((slot for slot in range(SLOTS) if slot not in used), None)

    async def _pull(self, ids: list[int], handle: dict[str, Any]) -> int | None:
        await self._take_time("fetching")
        self._check()
        if self.keeps and time.perf_counter() >= handle.get(READ_UNTIL, 0.0):
            return None
        try:
            if handle["alive"] and not _locked(handle["alive"]):
                return None
            state, length = json.loads(Path(handle["at"]).read_text())
        except (OSError, ValueError, KeyError):
            return None
        if len(ids) == length + 1 and length % BLOCK == 0:
            self.errored = True
            raise EngineDeadError("the blocks are not those of the prompt")
        Path(handle["read"]).touch()
        return int(state)

    async def _decode(self, state: int, params: dict[str, Any], ids: list[int]) -> AsyncGenerator[Any, None]:
        for count in range(1, params["max_tokens"] + 1):
            token = next_token(state, VOCAB)
            state = crc32(token.to_bytes(4, "little"), state)
            stop = token in params["stop_token_ids"]
            last = stop or count == params["max_tokens"]
            self._step()
            output = _output([token], ("stop" if stop else "length") if last else None, likely=params.get("logprobs"))
            if count == 1 and "prompt_logprobs" in params:
                output.prompt_logprobs = [None, *(likelihoods(id, params["prompt_logprobs"]) for id in ids[1:])]
            yield output
            if not last:
                await asyncio.sleep(STEP_S)
                self._check()


def likelihoods(token: int, count: int) -> dict[int, Any]:
    """By token, as vLLM tells them: the chosen one first, then the `count` likeliest. The chosen one is the second of
    them, the third can't be."""
    values = {1: -0.25, 2: -1.0 - token / VOCAB, 3: float("-inf")}
    ranks = {rank: token if rank == 2 else (token + rank) % VOCAB for rank in range(1, count + 1)}
    found = {token: SimpleNamespace(logprob=values[2], rank=2)}
    return found | {at: SimpleNamespace(logprob=values.get(rank, -50.0), rank=rank) for rank, at in ranks.items()}


def _locked(path: str) -> bool:
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _output(
    tokens: list[int], reason: str | None, handle: Any = None, stamped: float = 0.0, likely: int | None = None
) -> Any:
    logprobs = None if likely is None else [likelihoods(token, likely) for token in tokens]
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=logprobs)],
        kv_transfer_params=handle,
        metrics=SimpleNamespace(last_token_ts=stamped),
        num_cached_tokens=0,
        num_cache_creation_tokens=0,
    )


def stored_event(ids: list[int]) -> bytes:
    """What an engine publishes when it has kept the KV cache of a request, prompt and output."""
    whole = ids[: (len(ids) - 1) // BLOCK * BLOCK]
    names = [state.to_bytes(8, "big") for state in feed(whole)[BLOCK - 1 :: BLOCK]]
    event = {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": whole,
        "block_size": BLOCK, "lora_id": None, "medium": "GPU",
    }  # fmt: skip
    return bytes(msgpack.packb([0.0, [event], 0]))


def prompt_of(ids: list[int], salt: str = "") -> dict[str, Any]:
    return {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})


def runner_of(
    client: FakeClient, name: str, lease_s: float = 30.0, margin_s: float = 0.5, **changes: Any
) -> VllmRunner:
    made: dict[str, Any] = {
        "name": name, "sampling": dict, "prompt": prompt_of, "lease_s": lease_s,
    } | changes  # fmt: skip
    runner = VllmRunner(facts(margin_s, prefills=client.keeps, reads_back=client.reads_back), client, **made)
    client.stepped = lambda index, usage: runner.stepped(usage)
    return runner


def main(
    role: Any, bus: str, controller: str, folder: str, instance: str, lease_s: str = "30", slow_s: str = "0",
    keeps: str = "",
) -> None:  # fmt: skip
    import click

    from bus.runtime import cli, logs
    from bus.runtime.loop import Loop
    from nodes.config import NodeConfig
    from nodes.node import Node
    from nodes.vllm.engine import EngineThread

    alive = open(f"{folder}/{instance}-{time.time_ns()}.alive", "w")  # noqa: SIM115
    fcntl.flock(alive, fcntl.LOCK_EX)

    async def build() -> FakeClient:
        client = FakeClient(Path(folder), instance, float(lease_s), float(slow_s))
        client.alive = alive.name
        client.keeps = bool(keeps) and role == "decode"
        client.reads_back = keeps == "reads"
        return client

    @click.command()
    def command() -> None:
        logs.configure("info", part="node", instance=instance)
        loop = Loop()
        config = NodeConfig(role, instance, 1, (0,), bus, (controller,), f"ipc://{folder}")
        with EngineThread(build, lambda client: None) as engine:
            runner = runner_of(
                engine.client, instance, float(lease_s), on_engine=engine.call, on_link=loop.call_threadsafe
            )
            if engine.client.reads_back:
                relay = runner.relay = EventRelay(instance, 0, runner.cache_changed)
                numbers = itertools.count()
                engine.client.stored = lambda ids: loop.call_threadsafe(
                    lambda: relay.received((b"", next(numbers).to_bytes(8, "big"), stored_event(ids)))
                )
            with Node(config, loop, {0: runner}) as node:
                loop.on_signals(node.on_signal)
                cli.leave_with_parent(node.leave)
                node.run(lambda node: cli.ready(epoch=node.host.ranks[0].epoch))

    sys.argv = sys.argv[:1]
    cli.run(command, "fake_vllm")


if __name__ == "__main__":
    main(*sys.argv[1:])
