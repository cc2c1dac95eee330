"""A runner that behaves as vLLM's engines do behind a connector of their own, traps included.

Decode wants the prompt and samples the first token itself. Prefill keeps a prompt's KV in one of a few slots, for a
lease, and hands over an opaque handle that names the slot: after the lease the slot is used again, and whoever pulls
late gets another prompt's KV and no error. An engine that is fed `DEADLY` is dead for good.

The "KV" is the sim engine's state after the prompt, in files of a folder that all engines share.

    python -P -m vllm_like ROLE BUS CONTROLLER FOLDER INSTANCE [LEASE_S]        (PYTHONPATH=tests/support)
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from bus.wire.messages import Load
from nodes.link.leg import Leg
from nodes.link.runner import (
    Began,
    Dead,
    Emit,
    Fetched,
    Finished,
    Held,
    LegFailed,
    Output,
    RankFacts,
)
from nodes.own.engines.sim import feed, next_token

VOCAB = 512
DEADLY = 511
SLOTS = 4
STEP_S = 0.004
PULL_S = 0.004


class Timers(Protocol):
    def call_later(self, delay_s: float, function: Callable[[], None], /) -> Any: ...


def facts(margin_s: float = 0.5) -> RankFacts:
    return RankFacts(
        model="like", max_context=4096, kv_capacity=100_000, max_running=16, block_tokens=16, vocab_size=VOCAB,
        kv_transfer="files", kv_layout="like/1", wants_prompt=True, handle_margin_s=margin_s,
    )  # fmt: skip


class VllmLike:
    def __init__(self, timers: Timers, folder: Path, name: str, lease_s: float = 30.0, margin_s: float = 0.5) -> None:
        self.facts = facts(margin_s)
        self.free = deque(range(SLOTS))  # slots; the one that was freed first is used first
        self.prompt_tokens_computed = 0
        self._timers = timers
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lease_s = lease_s
        self._legs: dict[Leg, int] = {}  # live ones, with the slot where they hold one
        self._queue: deque[Leg] = deque()  # prompts that wait for a slot
        self._began: set[Leg] = set()
        self._dead = False

    def attach(self, emit: Emit) -> None:
        self._emit = emit

    def start(self, leg: Leg) -> None:
        assert len(leg.prompt) == leg.prompt_tokens, "decode gets the prompt too"
        self._legs[leg] = -1
        if DEADLY in leg.prompt:
            self._timers.call_later(STEP_S, self.die)
        elif leg.role == "decode":
            self._timers.call_later(PULL_S, lambda: self._pull(leg))
        elif leg.role == "unified":
            self._timers.call_later(STEP_S, lambda: self._decode(leg, feed(leg.prompt)[-1]))
        else:
            self._queue.append(leg)
            self._prefill()

    def cancel(self, leg: Leg) -> None:
        self._began.discard(leg)
        if leg in self._queue:
            self._queue.remove(leg)
        slot = self._legs.pop(leg, -1)
        if slot >= 0:
            self.free.append(slot)
            self._prefill()

    def release(self, leg: Leg) -> None:
        self.cancel(leg)

    @property
    def busy(self) -> bool:
        return False

    def load(self) -> Load:
        waiting = [leg for leg in self._legs if leg not in self._began]
        return Load(
            seq=0, step=0, running=len(self._began), waiting=len(waiting),
            waiting_tokens=sum(leg.prompt_tokens for leg in waiting), kv_tokens=0, kv_capacity=0, max_running=0,
        )  # fmt: skip

    def turn(self, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def close(self) -> None: ...

    # --- the engine -----------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        while self._queue and self.free:
            leg, slot = self._queue.popleft(), self.free.popleft()
            self._legs[leg] = slot
            self._timers.call_later(STEP_S, lambda leg=leg, slot=slot: self._computed(leg, slot))  # type: ignore[misc]

    def _computed(self, leg: Leg, slot: int) -> None:
        if self._dead or self._legs.get(leg) != slot:
            return
        self.prompt_tokens_computed += leg.prompt_tokens
        state = feed(leg.prompt)[-1]
        (self._folder / str(slot)).write_text(json.dumps(state))
        self._began.add(leg)
        self._emit(Began(leg))
        handle = json.dumps({"slot": str(self._folder / str(slot))}).encode()
        self._emit(Held(leg, next_token(state, VOCAB), handle, self._lease_s))
        self._timers.call_later(self._lease_s, lambda: self.cancel(leg))  # whoever may still want it

    def _pull(self, leg: Leg) -> None:
        if self._dead or leg not in self._legs:
            return
        assert leg.handle is not None
        try:
            state = json.loads(Path(json.loads(leg.handle.data)["slot"]).read_text())
        except (OSError, ValueError):
            self.cancel(leg)
            self._emit(LegFailed(leg, "kv_failed", "the slot is gone"))
            return
        self._emit(Fetched(leg, PULL_S))
        self._decode(leg, state)

    def _decode(self, leg: Leg, state: int, count: int = 0) -> None:
        if self._dead or leg not in self._legs:
            return
        token = next_token(state, VOCAB)
        state = crc32(token.to_bytes(4, "little"), state)
        self._began.add(leg)
        self._emit(Output(leg, (token,)))
        if token in leg.stop_ids or count + 1 == leg.max_tokens:
            self.cancel(leg)
            self._emit(Finished(leg, "stop" if token in leg.stop_ids else "length"))
        else:
            self._timers.call_later(STEP_S, lambda: self._decode(leg, state, count + 1))

    def die(self) -> None:
        self._dead = True
        self._emit(Dead("EngineDeadError"))


def main(role: Any, bus: str, controller: str, folder: str, instance: str, lease_s: str = "30") -> None:
    import click

    from bus.runtime import cli, logs
    from bus.runtime.loop import Loop
    from nodes.config import NodeConfig
    from nodes.node import Node

    @click.command()
    def command() -> None:
        logs.configure("info", part="node", instance=instance)
        loop = Loop()
        config = NodeConfig(role, instance, 1, (0,), bus, (controller,), f"ipc://{folder}")
        with Node(config, loop, {0: VllmLike(loop, Path(folder), instance, float(lease_s))}) as node:
            loop.on_signals(node.on_signal)
            cli.leave_with_parent(node.leave)
            node.run(lambda node: cli.ready(epoch=node.host.ranks[0].epoch))

    sys.argv = sys.argv[:1]
    cli.run(command, "vllm_like")


if __name__ == "__main__":
    main(*sys.argv[1:])
