"""Scenarios: what is asked, what befalls and what must come of it, as data (`scenarios.toml`), played on a stage.

One stage is the simulated cluster (`simulated.py`), the other real processes behind links that can be cut
(`processes.py`). Both must come to the verdict that the scenario states. Steps wait for events, never for a time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nodes.own.engines.sim import sim_generate
from pdbus.client.options import Options
from pdbus.client.output import Result
from pdbus.client.request import Request

FILE = Path(__file__).with_name("scenarios.toml")
WAIT_S = 120.0
STEP_S = 0.02  # of an engine: a token takes so long at least
VOCAB = 512


@dataclass(frozen=True)
class Shape:
    """A cluster: `ranks` says of each role how many ranks each of its processes has."""

    name: str
    controllers: int
    ranks: dict[str, list[int]]
    settings: dict[str, Any] = field(default_factory=dict)  # of the controllers

    @property
    def leg(self) -> str:
        return "unified" if "unified" in self.ranks else "pair"

    def nodes(self) -> dict[str, tuple[str, int]]:
        """Return role and ranks of each node process by its name, which is its instance's, too."""
        return {f"{role}-{n}": (role, some) for role, each in self.ranks.items() for n, some in enumerate(each)}

    def controller_names(self) -> list[str]:
        return [f"controller-{n}" for n in range(self.controllers)]


@dataclass(frozen=True)
class Scenario:
    name: str
    shape: Shape
    steps: tuple[str, ...]
    expect: dict[str, str]  # the code of each request
    quick: bool = False


@dataclass
class Asked:
    """A request, and what its caller was told."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    request: Request
    ids: list[int] = field(default_factory=list)
    result: Result | None = None
    ends: int = 0
    process: None = None  # the simulation's laws ask whose it is: a client's that does not crash
    killed: tuple[()] = ()  # and what died of it

    def update(self, update: tuple[int, ...] | Result) -> None:
        if isinstance(update, Result):
            self.result = self.result or update
            self.ends += 1
        else:
            self.ids.extend(update)
            self.ends += self.result is not None  # a token after the end

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def lives(self) -> bool:
        return self.result is None

    def odd(self) -> str:
        """Return what is wrong with what it was given; empty where nothing is."""
        assert self.result is not None
        right = sim_generate(self.prompt, self.max_tokens, VOCAB)
        if self.ends != 1:
            return f"{self.name} ended {self.ends} times"
        if self.ids != right[: len(self.ids)] or tuple(self.ids) != self.result.ids:
            return f"{self.name} has tokens of another: {self.ids}, not {right}"
        if self.result.code == "ok" and self.result.finish != "cancelled" and len(self.ids) != self.max_tokens:
            return f"{self.name} is not whole: {len(self.ids)} of {self.max_tokens}"
        return ""


@dataclass(frozen=True)
class Verdict:
    """How each request ended, and what was odd: of a request, or at rest."""

    codes: dict[str, str]
    odd: tuple[str, ...]


class Stage(Protocol):
    """A cluster of one shape that plays a scenario. Names are those of processes; the client's is `client-0`."""

    def begin(self, name: str, prompt: tuple[int, ...], options: Options, at: int, prefill_at: int | None) -> Asked: ...
    def cancel(self, asked: Asked) -> None: ...
    def until(self, true: Callable[[], bool], what: str) -> None: ...
    def ready(self, controller: str, node: str) -> bool: ...
    def kill(self, name: str) -> None: ...
    def drain(self, name: str) -> None: ...
    def pause(self, name: str) -> None: ...
    def resume(self, name: str) -> None: ...
    def reset(self, name: str, other: str) -> None: ...
    def hold(self, name: str, other: str) -> None: ...
    def free(self, name: str, other: str) -> None: ...
    def slow(self, name: str, other: str, late_s: float) -> None: ...
    def at_rest(self) -> str: ...


def scenarios() -> list[Scenario]:
    told = tomllib.loads(FILE.read_text(encoding="utf-8"))
    shapes = {name: Shape(name, **of) for name, of in told["shape"].items()}
    return [
        Scenario(each["name"], shapes[each["shape"]], tuple(each["steps"]), each["expect"], each.get("quick", False))
        for each in told["scenario"]
    ]


def skews() -> list[tuple[str, ...]]:
    """Return which processes are of release 0.1.0, together."""
    return [tuple(each["old"]) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["skew"]]


class Play:
    """One scenario on one stage."""

    def __init__(self, scenario: Scenario, stage: Stage) -> None:
        self.scenario = scenario
        self.stage = stage
        self.asked: dict[str, Asked] = {}
        self._paused: list[str] = []
        self._held: list[tuple[str, str]] = []

    def run(self) -> Verdict:
        """AssertionError where an event does not come."""
        stage = self.stage
        for step in self.scenario.steps:
            verb, *words = step.split()
            getattr(self, f"_{verb}")(*words)
        for name in self._paused:
            stage.resume(name)
        for pair in self._held:
            stage.free(*pair)
        self._until("all", "end")
        odd = [each.odd() for each in self.asked.values()]
        codes = {name: each.result.code for name, each in self.asked.items() if each.result is not None}
        return Verdict(codes, tuple(filter(None, [*odd, stage.at_rest()])))

    # --- steps --------------------------------------------------------------------------------------------------

    def _ask(self, name: str, *words: str) -> None:
        """`ask a tokens=40 prompt=20 at=0 prefill_at=1 deadline_s=2`"""
        said = dict(word.split("=") for word in words)
        first = len(self.asked) + 1
        prompt = tuple(3 + (first * 37 + n * 11) % 500 for n in range(int(said.pop("prompt", "20"))))
        at, prefill_at = int(said.pop("at", "0")), said.pop("prefill_at", None)
        options: Options = {"max_tokens": int(said.pop("tokens", "40")), "ignore_eos": True}
        if "deadline_s" in said:
            options["deadline_s"] = float(said.pop("deadline_s"))
        assert not said, said
        self.asked[name] = self.stage.begin(
            name, prompt, options, at, int(prefill_at) if prefill_at is not None else None
        )

    def _cancel(self, name: str) -> None:
        self.stage.cancel(self.asked[name])

    def _kill(self, name: str) -> None:
        self.stage.kill(self._who(name))

    def _drain(self, name: str) -> None:
        self.stage.drain(self._who(name))

    def _pause(self, name: str) -> None:
        self._paused.append(self._who(name))
        self.stage.pause(self._paused[-1])

    def _resume(self, name: str) -> None:
        who = self._who(name)
        self._paused.remove(who)
        self.stage.resume(who)

    def _reset(self, name: str, other: str) -> None:
        self.stage.reset(self._who(name), self._who(other))

    def _hold(self, name: str, other: str) -> None:
        self._held.append((self._who(name), self._who(other)))
        self.stage.hold(*self._held[-1])

    def _free(self, name: str, other: str) -> None:
        pair = self._who(name), self._who(other)
        self._held.remove(pair)
        self.stage.free(*pair)

    def _slow(self, name: str, other: str, late_s: str) -> None:
        self.stage.slow(self._who(name), self._who(other), float(late_s))

    def _until(self, *words: str) -> None:
        self.stage.until(self._condition(*words), f"{self.scenario.name}: {' '.join(words)}")

    # --- inside -------------------------------------------------------------------------------------------------

    def _condition(self, who: str, verb: str, *rest: str) -> Callable[[], bool]:
        if who == "all":
            return lambda: not any(each.lives for each in self.asked.values())
        if verb == "ready":
            return lambda: all(self.stage.ready(each, who) for each in self.scenario.shape.controller_names())
        if verb == "lost":
            return lambda: not self.stage.ready(who, rest[0])
        if verb == "knows":
            return lambda: self.stage.ready(who, rest[0])
        asked = self.asked[who]
        match verb:
            case "ends":
                return lambda: not asked.lives
            case "has":
                return lambda: len(asked.ids) >= int(rest[0]) or not asked.lives
            case "runs":
                return lambda: asked.request.decode is not None or not asked.lives
            case "waits":
                return lambda: bool(asked.request.queued) or not asked.lives
        raise ValueError(f"no such condition: {who} {verb}")

    def _who(self, name: str) -> str:
        """`a.decode` is the process whose rank runs that leg of request a."""
        asked, dot, role = name.partition(".")
        if not dot:
            return name
        request = self.asked[asked].request
        place = request.prefill if role == "prefill" else request.decode
        assert place is not None, f"{name}: it runs nowhere"
        return place.instance
