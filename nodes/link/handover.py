"""The hand-over between a rank on the link's thread and a scheduler on its own: who knows of which legs, and the load.

Both sides keep the same books (`KnownLegs`), a hand-over apart. What the scheduler says of its load is kept as the
difference from its own books at that moment, so it stays right while legs come, begin and end before it says more. Owns
no thread and no socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, get_args

from msgspec import Struct

from bus.wire.codes import Code
from bus.wire.messages import Load
from nodes.link.actions import Cancel, Release, Start
from nodes.link.leg import Leg, LegState
from nodes.link.puller import MAX_HANDLE_BYTES
from nodes.link.runner import (
    Began,
    Dead,
    Fetched,
    Finished,
    Held,
    LegFailed,
    Output,
    RankFacts,
    Stepped,
    Tell,
)

MAX_TOKEN_ID = (1 << 31) - 1
QUEUE_MAX = 65_536  # of what a scheduler's thread has said and the link's has not taken
FELL_BEHIND = "the link to the rank's scheduler fell behind"


class LoadSaid(Struct, frozen=True):
    """What the scheduler says of its load; the first four less what its own books hold (so they may be negative)."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens: int = 0
    step: int = 0
    busy: bool = False


class Nonsense(Struct, frozen=True):
    """The scheduler said something of a leg that means nothing: the leg can't go on."""

    leg: Leg
    why: str


OfLeg: TypeAlias = Began | Output | Held | Fetched | Finished | LegFailed
Said: TypeAlias = OfLeg | Dead | LoadSaid | Nonsense
_RUNS, _ENDS = (Output, Began, Held), (Finished, LegFailed)  # unions would be made anew for each token
Orders: TypeAlias = Callable[[Leg, Start | Cancel | Release], None]


class KnownLegs:
    """The legs that one side knows of, and which of them run. Prompts of those that do count as KV cache."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting_tokens = 0
        self.kv_tokens = 0
        self.begun: set[Leg] = set()  # those whose scheduler has said so; it may again, where it preempts
        self._runs: dict[Leg, bool] = {}

    def __contains__(self, leg: Leg) -> bool:
        return leg in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def waiting(self) -> int:
        return len(self._runs) - self.running

    def start(self, leg: Leg) -> None:
        self._runs[leg] = False
        self.waiting_tokens += leg.prompt_tokens

    def end(self, leg: Leg) -> None:
        """Of one that is unknown or over: nothing."""
        self.begun.discard(leg)
        runs = self._runs.pop(leg, None)
        if runs:
            self.running -= 1
            self.kv_tokens -= leg.prompt_tokens
        elif runs is not None:
            self.waiting_tokens -= leg.prompt_tokens

    def note(self, event: Said) -> None:
        """What the scheduler says, as far as it changes the books."""
        if isinstance(event, _RUNS):
            leg = event.leg
            if self._runs.get(leg) is False:
                self._runs[leg] = True
                self.running += 1
                self.waiting_tokens -= leg.prompt_tokens
                self.kv_tokens += leg.prompt_tokens
        elif isinstance(event, _ENDS):
            self.end(event.leg)


class HandedRunner:
    """One rank's runner, whose legs run on the scheduler's thread; this object lives on the link's."""

    def __init__(self, facts: RankFacts, order: Orders) -> None:
        self.facts = facts
        self._order = order
        self._legs = KnownLegs()
        self._said = LoadSaid()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._admitted_tokens = 0
        self._output_tokens = 0
        self._outputs = 0  # stands for steps where the scheduler does not tell them

    def attach(self, tell: Tell) -> None:
        self._tell = tell

    def start(self, leg: Leg) -> None:
        self._legs.start(leg)
        self._prompt_tokens += leg.prompt_tokens
        self._order(leg, Start(leg))

    def cancel(self, leg: Leg) -> None:
        self._end(leg)
        self._order(leg, Cancel(leg))

    def release(self, leg: Leg) -> None:
        self._end(leg)
        self._order(leg, Release(leg))

    @property
    def busy(self) -> bool:
        return self._said.busy

    def load(self) -> Load:
        legs, said = self._legs, self._said
        return Load(
            seq=0,
            running=max(0, legs.running + said.running),
            waiting=max(0, legs.waiting + said.waiting),
            waiting_tokens=max(0, legs.waiting_tokens + said.waiting_tokens),
            kv_tokens=max(0, legs.kv_tokens + said.kv_tokens),
            step=said.step or self._outputs,
            kv_capacity=0,
            max_running=0,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            output_tokens_total=self._output_tokens,
            admitted_tokens_total=self._admitted_tokens,
            computed_tokens_total=max(0, self._admitted_tokens - self._cached_tokens),
        )

    def turn(self, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass

    # --- from the scheduler, on the link's thread ---------------------------------------------------------------

    def hear(self, said: Said) -> bool:
        """False when it made no sense: its leg has failed."""
        if type(said) is Output and said.leg in self._legs and not _nonsense_in(said, self.facts):
            self._outputs += 1  # one for each token, hence the short way
            self._output_tokens += len(said.tokens)
            self._legs.note(said)
            self._tell(said)
        elif isinstance(said, LoadSaid):
            self._said = said
            self._settle()  # it may have been said before the last leg was cancelled
            self._tell(Stepped())
        elif isinstance(said, Dead):
            self._tell(said)
        elif said.leg not in self._legs:
            return True  # over meanwhile
        elif why := said.why if isinstance(said, Nonsense) else _nonsense(said, self.facts):
            self.give_up(said.leg, f"the rank's scheduler said nonsense: {type(said).__name__}: {why}")
            return False
        else:
            assert not isinstance(said, Nonsense)
            if isinstance(said, Began) and said.leg not in self._legs.begun:
                self._legs.begun.add(said.leg)
                self._cached_tokens += said.cached_tokens
                self._admitted_tokens += said.leg.prompt_tokens
            self._legs.note(said)
            self._settle()
            self._tell(said)
        return True

    def give_up(self, leg: Leg, why: str) -> None:
        """What the scheduler said of it is lost, or means nothing: it can't go on."""
        if leg in self._legs:
            self.cancel(leg)
            self._tell(LegFailed(leg, "engine_failed", why))

    def _end(self, leg: Leg) -> None:
        self._legs.end(leg)
        self._settle()

    def _settle(self) -> None:
        """Without legs nothing of ours waits or runs, in whatever way the scheduler counted them before."""
        if not self._legs:
            self._said = LoadSaid(step=self._said.step)


def _nonsense(event: OfLeg, facts: RankFacts) -> str:
    """Why it can't be: it would go out to others as it is."""
    vocab = facts.vocab_size or MAX_TOKEN_ID + 1
    match event:
        case Output():
            return _nonsense_in(event, facts)
        case Began(leg, cached_tokens):
            prompt = leg.prompt_tokens
            return "" if 0 <= cached_tokens <= prompt else f"{cached_tokens} cached tokens of a prompt of {prompt}"
        case Held(leg, first_token, handle, valid_s):
            if leg.role != "prefill" or leg.state is not LegState.RUNNING:
                return "a leg that is no prefill leg, or that is held already"
            if not 0 <= first_token < vocab:
                return f"a first token outside 0..{vocab - 1}"
            if not 0 < len(handle) <= MAX_HANDLE_BYTES:
                return f"a handle of {len(handle)} bytes; 1 to {MAX_HANDLE_BYTES} can be handed over"
            return "" if valid_s > 0 else f"kept for {valid_s} s"
        case Fetched(leg, seconds):
            return "" if leg.role == "decode" and seconds >= 0 else f"a {leg.role} leg, {seconds} s"
        case Finished(leg, reason):
            if leg.role == "prefill":
                return "a prefill leg ends when its KV cache is released"
            return "" if reason in ("stop", "length") else f"for {reason!r}"
        case LegFailed(code=code):
            return "" if code in get_args(Code) and code != "ok" else f"with code {code!r}"


def _nonsense_in(output: Output, facts: RankFacts) -> str:
    leg, tokens, logprobs = output.leg, output.tokens, output.logprobs
    vocab = facts.vocab_size or MAX_TOKEN_ID + 1
    if leg.role == "prefill":
        return "a prefill leg has none: its first token comes with Held"
    if len(leg.output) + len(tokens) > leg.max_tokens:
        return f"{len(leg.output) + len(tokens)} tokens where {leg.max_tokens} were asked for"
    if len(logprobs) != (len(tokens) if leg.wants_logprobs else 0):
        return f"log probabilities of {len(logprobs)} tokens for {len(tokens)}, asked: {leg.params.logprobs}"
    for each in logprobs:
        if len(each.top) > leg.params.logprobs or not all(0 <= token < vocab for token, _ in each.top):
            return f"more likeliest tokens than {leg.params.logprobs}, or outside 0..{vocab - 1}: {each.top}"
    return f"token ids outside 0..{vocab - 1}" if tokens and not 0 <= min(tokens) <= max(tokens) < vocab else ""


def said_of(leg: Leg, make: Callable[[], OfLeg]) -> OfLeg | Nonsense:
    """The event that `make` makes of what an engine gave, or Nonsense where that is of no use."""
    try:
        return make()
    except (TypeError, ValueError, OverflowError) as error:
        return Nonsense(leg, f"{type(error).__name__}: {error}")
