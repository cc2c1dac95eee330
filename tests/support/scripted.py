"""Ranks whose answers are given as token ids, so that a test decides what a model says: a tool call, half of one, or
nonsense. Prefill, decode and unified; no model, no weights.

An answer belongs to the prompts in which its mark, some token ids, occurs; of several marks the last in the prompt
counts. So each round of a conversation has an answer of its own. A resumed request goes on where it was, but for one
with a grammar, which is refused, as real engines do. With a gate each token waits for a permit, which a test gives once
the last one was read.

    python -P -m scripted ROLE BUS CONTROLLER FOLDER INSTANCE SCRIPT [STEP_S [KEYS]]      (PYTHONPATH=tests/support)

SCRIPT is a file that `Script.saved` wrote.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from msgspec import json

from bus.wire.messages import OPTIONAL_PARAMS, Load, TokenLogprobs
from nodes.link.leg import Leg
from nodes.link.runner import Began, Emit, Fetched, Finished, Held, LegFailed, Output, RankFacts

UNKNOWN = ("prompt_logprobs",)  # parameters that a script can't answer
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")
HANDLE = b"script"
READY_S = 60.0


@dataclass(frozen=True)
class Answer:
    """The output `ids` for prompts with `mark`."""

    mark: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """The answers of a model; after the last token of one comes its end, as if `max_tokens` were reached. A prompt
    without a mark has the answer `otherwise` (None: such a prompt fails)."""

    answers: tuple[Answer, ...]
    model: str = "scripted"
    vocab_size: int = 0
    eos_ids: tuple[int, ...] = ()
    max_context: int = 8192
    otherwise: tuple[int, ...] | None = None
    params: tuple[str, ...] = field(default=tuple(name for name, _ in OPTIONAL_PARAMS if name not in UNKNOWN))

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...] | None:
        """The answer to a prompt; None where there is none."""
        text = "".join(map(chr, prompt))  # ids are below 2^20: a search of C's, and no two ids are one character
        found = [(text.rfind("".join(map(chr, each.mark))), each.ids) for each in self.answers]
        at, ids = max(found, key=lambda each: each[0], default=(-1, ()))
        return ids if at >= 0 else self.otherwise

    def saved(self, path: Path) -> Path:
        path.write_bytes(json.encode(self))
        return path


def loaded(path: Path) -> Script:
    return json.decode(path.read_bytes(), type=Script)


class Gate:
    """Permits for tokens, from any thread. An open gate needs none."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.permits = 0
        self.on_change: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def release(self, count: int = 1) -> None:
        """Permit `count` more tokens."""
        with self._lock:
            self.permits += count
        self._changed()

    def open(self) -> None:
        self.is_open = True
        self._changed()

    def close(self) -> None:
        """Withdraw all permits."""
        with self._lock:
            self.is_open, self.permits = False, 0

    def take(self) -> bool:
        """Take a permit; False where there is none."""
        with self._lock:
            if not self.is_open and not self.permits:
                return False
            self.permits -= not self.is_open
            return True

    def _changed(self) -> None:
        for each in self.on_change:
            each()


class Timers(Protocol):
    def call_later(self, delay_s: float, function: Callable[[], None], /) -> Any: ...


class Scripted:
    """The runner of one rank."""

    def __init__(
        self, timers: Timers, script: Script, gate: Gate | None = None, step_s: float = 0.0, max_running: int = 64
    ) -> None:
        self.script = script
        self.facts = RankFacts(
            model=script.model, max_context=script.max_context, kv_capacity=64 * script.max_context,
            max_running=max_running,
            block_tokens=16, vocab_size=script.vocab_size, eos_ids=script.eos_ids, kv_transfer="script",
            kv_layout="script/1", wants_prompt=True, params=script.params,
        )  # fmt: skip
        self.made_total = 0  # tokens
        self.fetches = True  # a decode rank gets its KV caches; False: they are on their way for ever
        self.fails = ""  # a reason: the next token of each leg is its failure
        self.on_gone: Callable[[Leg], None] = lambda leg: None  # it holds nothing of this leg any more
        self._timers = timers
        self._gate = gate or Gate(is_open=True)
        self._step_s = step_s
        self._live: dict[Leg, tuple[int, ...]] = {}  # with the answer
        self._made: dict[Leg, int] = {}  # tokens of it, of decode and unified legs
        self._due = False

    def attach(self, emit: Emit) -> None:
        self._emit = emit

    def start(self, leg: Leg) -> None:
        answer = self.script.answer(leg.prompt[: len(leg.prompt) - leg.offset])
        if answer is None or leg.offset >= len(answer):
            self._emit(LegFailed(leg, "bad_request", "the script has no answer to this"))
            return
        if leg.offset and any(getattr(leg.params, name) for name in GRAMMARS):
            self._emit(LegFailed(leg, "bad_request", "an output with a grammar can't be resumed"))
            return
        self._live[leg] = answer
        if leg.role == "decode":
            if not self.fetches:
                return
            self._emit(Fetched(leg, 0.0))
        self._emit(Began(leg))
        if leg.role == "prefill":
            self._emit(Held(leg, answer[leg.offset], HANDLE))
            return
        self._made[leg] = 0
        self._plan()

    def cancel(self, leg: Leg) -> None:
        self._live.pop(leg, None)
        self._made.pop(leg, None)
        self.on_gone(leg)

    release = cancel

    @property
    def busy(self) -> bool:
        return False

    def load(self) -> Load:
        return Load(
            seq=0, step=self.made_total, running=len(self._made), waiting=0, waiting_tokens=0,
            kv_tokens=sum(leg.prompt_tokens for leg in self._live), kv_capacity=0, max_running=0,
        )  # fmt: skip

    def turn(self, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def close(self) -> None: ...

    def wake(self) -> None:
        """Emit the tokens that the gate permits now."""
        self._plan()

    def _plan(self) -> None:
        if not self._due and self._made:
            self._due = True
            self._timers.call_later(self._step_s, self._step)

    def _step(self) -> None:
        """Emit a token of each leg, in the order in which the legs came, as far as the gate permits."""
        self._due = False
        moved = False
        for leg in list(self._made):
            if not self._gate.take():
                break
            moved = True
            if self.fails:
                self.cancel(leg)
                self._emit(LegFailed(leg, "bad_request", self.fails))
                continue
            self._make_token(leg)
        if moved:
            self._plan()

    def _make_token(self, leg: Leg) -> None:
        answer, made = self._live[leg], self._made[leg]
        token = answer[leg.offset + made]
        self._made[leg] = made + 1
        self.made_total += 1
        likely = (TokenLogprobs(-0.5, ((token, -0.5),)[: leg.params.logprobs], 1),) if leg.wants_logprobs else ()
        self._emit(Output(leg, (token,), likely))
        if token in leg.stop_ids:
            self._end(leg, "stop")
        elif made + 1 == leg.max_tokens or leg.offset + made + 1 == len(answer):
            self._end(leg, "length")

    def _end(self, leg: Leg, why: Any) -> None:
        self.cancel(leg)
        self._emit(Finished(leg, why))


@contextmanager
def rank(
    role: Any, bus: str, controller: str, folder: Path, script: Script, gate: Gate | None = None,
    instance: str = "", step_s: float = 0.0, keys: str = "", max_running: int = 64,
) -> Iterator[Scripted]:  # fmt: skip
    """A rank on a thread of this process; it has joined on entry."""
    from bus.runtime.loop import Loop
    from nodes.config import NodeConfig
    from nodes.node import Node

    joined = threading.Event()
    found: list[tuple[Node, Scripted]] = []

    def serve() -> None:
        loop = Loop()
        runner = Scripted(loop, script, gate, step_s, max_running)
        if gate is not None:
            gate.on_change.append(lambda: loop.call_threadsafe(runner.wake))
        config = NodeConfig(role, instance or role, 1, (0,), bus, (controller,), f"ipc://{folder}", keys=keys)
        with Node(config, loop, {0: runner}) as node:
            found.append((node, runner))
            node.run(lambda node: joined.set())

    thread = threading.Thread(target=serve, name=f"scripted {role}", daemon=True)
    thread.start()
    assert joined.wait(READY_S), f"the {role} rank did not join"
    node, runner = found[0]
    try:
        yield runner
    finally:
        if gate is not None:
            gate.on_change.clear()
        node.leave()
        thread.join(READY_S)


def main(
    role: Any, bus: str, controller: str, folder: str, instance: str, script: str, step_s: str = "0", keys: str = ""
) -> None:
    import click

    from bus.runtime import cli, logs
    from bus.runtime.loop import Loop
    from nodes.config import NodeConfig
    from nodes.node import Node

    @click.command()
    def command() -> None:
        logs.configure("info", part="node", instance=instance)
        loop = Loop()
        config = NodeConfig(role, instance, 1, (0,), bus, (controller,), f"ipc://{folder}", keys=keys)
        with Node(config, loop, {0: Scripted(loop, loaded(Path(script)), step_s=float(step_s))}) as node:
            loop.on_signals(node.on_signal)
            cli.leave_with_parent(node.leave)
            node.run(lambda node: cli.ready(epoch=node.host.ranks[0].epoch))

    sys.argv = sys.argv[:1]
    cli.run(command, "scripted")


if __name__ == "__main__":
    main(*sys.argv[1:])
