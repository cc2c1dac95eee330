"""An `EngineClient` that behaves as vLLM's behind NIXL, traps included, without vLLM; and a node process over it.

Prefill keeps a prompt's KV in one of a few slots, until a decode engine has read it or the lease is over; then the slot
is used again, and whoever reads late gets another prompt's KV and no error. A decode engine that is given more than the
prompt dies where the prompt fills its blocks. Statistics come with steps alone, and are of no use in between. A request
that is waited for no more is aborted. An engine that is fed `DEADLY` is dead for good. What is being fetched from an
engine that is killed meanwhile does not come. A decode engine that keeps its KV caches (`keeps`) does as vLLM's with
`nodes.vllm.safe_pulls`: a fetch that ends after its lease, or of which no lease is said, has failed.

The "KV" is the sim engine's state after the prompt, in files of a folder that all engines share. A slow engine leaves a
file `computing` or `fetching` there, and takes SLOW_S for either.

    python -P -m fake_vllm ROLE BUS CONTROLLER FOLDER INSTANCE [LEASE_S [SLOW_S [keeps]]]    (PYTHONPATH=tests/support)
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

from nodes.link.facts import RankFacts
from nodes.own.engines.sim import feed, next_token
from nodes.vllm.runner import VllmRunner
from nodes.vllm.sampling import GRAMMARS, KNOWN, REASONING, THINKING, UNIFIED

VOCAB = 512
DEADLY = 511
SLOTS = 4
BLOCK = 16
CAPACITY = 1600
STEP_S = 0.004


class EngineDeadError(Exception):
    pass


def facts(margin_s: float = 0.5, *, prefills: bool = False) -> RankFacts:
    return RankFacts(
        model="like", max_context=4096, kv_capacity=CAPACITY, max_running=16, block_tokens=BLOCK, vocab_size=VOCAB,
        kv_transfer="files", kv_layout="like/1", wants_prompt=True, handle_margin_s=margin_s,
        params=(*KNOWN, *GRAMMARS, *UNIFIED, *THINKING, *REASONING, "parser:qwen3"), prefills=prefills,
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
        self._kept: list[list[int]] = []  # token ids of requests that are over
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
                yield await self._prefill(ids)
                return
            hits = self._hits(ids)
            state = await self._pull(ids, extra) if extra.get("do_remote_prefill") else await self._compute(ids, hits)
            if state is None:
                yield _output([], "error")
                return
            tokens = []
            async for output in self._decode(state, sampling_params, ids):
                output.num_cached_tokens = hits
                tokens += output.outputs[0].token_ids
                yield output
            if self.keeps:
                self._kept.append([*ids, *tokens])
        finally:
            del self.live[request_id]

    def _check(self) -> None:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")

    def _step(self) -> None:
        self.stepped(0, min(1.0, sum(map(len, self.live.values())) / CAPACITY))

    async def _take_time(self, doing: str) -> None:
        if self._slow_s:
            (self._folder.parent / doing).touch()
        await asyncio.sleep(self._slow_s or STEP_S)

    def _hits(self, ids: list[int]) -> int:
        """Tokens in whole blocks that some kept request began with; the last one of a prompt is always computed."""
        longest = 0
        for kept in self._kept:
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, kept, strict=False)))
            longest = max(longest, min(same, len(ids) - 1) // BLOCK * BLOCK)
        return longest

    async def _compute(self, ids: list[int], hits: int = 0) -> int:
        await self._take_time("computing")
        self._check()
        self.computed += len(ids) - hits
        self._step()
        return int(feed(ids)[-1])

    async def _prefill(self, ids: list[int]) -> Any:
        while (slot := self._free_slot()) is None:
            await asyncio.sleep(STEP_S)
        read = self._folder / f"{next(self._numbers)}.read"
        self._held[slot] = float("inf"), read
        try:
            state = await self._compute(ids)
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
        made.num_cache_creation_tokens = len(ids) // BLOCK * BLOCK
        return made

    def _free_slot(self) -> int | None:
        for slot, (until, read) in list(self._held.items()):
            if self.clock() >= until or read.exists():
                del self._held[slot]
        return next((slot for slot in range(SLOTS) if slot not in self._held), None)

    async def _pull(self, ids: list[int], handle: dict[str, Any]) -> int | None:
        await self._take_time("fetching")
        self._check()
        if self.keeps and time.perf_counter() >= handle.get("remote_blocks_expiry_time", 0.0):
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


def prompt_of(ids: list[int], salt: str = "") -> dict[str, Any]:
    return {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})


def runner_of(
    client: FakeClient, name: str, lease_s: float = 30.0, margin_s: float = 0.5, **changes: Any
) -> VllmRunner:
    made: dict[str, Any] = {
        "name": name, "sampling": dict, "prompt": prompt_of, "lease_s": lease_s,
    } | changes  # fmt: skip
    runner = VllmRunner(facts(margin_s, prefills=client.keeps), client, **made)
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
        client.keeps = bool(keeps)
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
            with Node(config, loop, {0: runner}) as node:
                loop.on_signals(node.on_signal)
                cli.leave_with_parent(node.leave)
                node.run(lambda node: cli.ready(epoch=node.host.ranks[0].epoch))

    sys.argv = sys.argv[:1]
    cli.run(command, "fake_vllm")


if __name__ == "__main__":
    main(*sys.argv[1:])
