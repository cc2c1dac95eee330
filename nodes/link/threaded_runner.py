"""The hand-over of legs (what a rank runs of requests), events and loads between a rank on the link's thread and a
scheduler on a thread of its own.

Both sides keep the same accounts (`LegAccounting`); one side is a hand-over behind the other. A load that the scheduler
reports is kept as the difference from the scheduler's accounts at that moment. So the sum stays right while legs come,
begin and end before its next report. This module owns no thread and no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, get_args

from msgspec import Struct

from bus.wire.codes import Code
from bus.wire.messages import Load, TokenLogprobs
from nodes.link.actions import Cancel, Release, Start
from nodes.link.leg import Leg, LegState
from nodes.link.puller import MAX_HANDLE_BYTES
from nodes.link.runner import (
    Began,
    Dead,
    Emit,
    Fetched,
    Finished,
    Held,
    LegFailed,
    Output,
    PromptLogprobs,
    RankFacts,
    Stepped,
)

MAX_TOKEN_ID = (1 << 31) - 1
NOTHING = -1
QUEUE_MAX = 65_536  # events that the scheduler's thread has put in and the link's has not taken
FELL_BEHIND = "the link to the rank's scheduler fell behind"


class LoadUpdate(Struct, frozen=True):
    """The load that the scheduler reports. The first four are differences from its accounts: they may be negative."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens: int = 0
    step: int = 0
    busy: bool = False


class InvalidEvent(Struct, frozen=True):
    """The scheduler gave an event that no leg can have: its leg fails, for the reason in `why`."""

    leg: Leg
    why: str


LegEvent: TypeAlias = Began | Output | PromptLogprobs | Held | Fetched | Finished | LegFailed
RunnerEvent: TypeAlias = LegEvent | Dead | LoadUpdate | InvalidEvent
_RUNS, _ENDS = (Output, Began, Held), (Finished, LegFailed)  # a union would be built again for each token
Orders: TypeAlias = Callable[[Leg, Start | Cancel | Release], None]


class LegAccounting:
    """The legs that one side knows, and the sums over them: how many run and wait, and their tokens. A prompt counts as
    KV cache once its leg runs; until then what is to be computed or fetched of it waits."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting_tokens = 0
        self.to_fetch_tokens = 0  # of these, of decode legs
        self.kv_tokens = 0
        self.kv_pinned = 0  # of these, of legs that are held for their decode ranks
        self.begun: set[Leg] = set()  # legs that the scheduler has begun; it may begin one again after a preemption
        self._waits: dict[Leg, int] = {}  # so many tokens; NOTHING: the leg runs
        self._held: set[Leg] = set()

    def __contains__(self, leg: Leg) -> bool:
        return leg in self._waits

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def waiting(self) -> int:
        """The number of legs that have not begun."""
        return len(self._waits) - self.running

    def start(self, leg: Leg, cached_tokens: int = 0) -> None:
        """Add a leg, which waits; so many tokens of its prompt are expected to be in the prefix cache."""
        self._waits[leg] = tokens = leg.prompt_tokens - cached_tokens
        self._wait(leg, tokens)

    def end(self, leg: Leg) -> None:
        """Remove a leg; do nothing where it is unknown or over."""
        self.begun.discard(leg)
        waits = self._waits.pop(leg, None)
        if waits == NOTHING:
            self.running -= 1
            self.kv_tokens -= leg.prompt_tokens
            if leg in self._held:
                self._held.remove(leg)
                self.kv_pinned -= leg.prompt_tokens
        elif waits is not None:
            self._wait(leg, -waits)

    def note(self, event: RunnerEvent) -> None:
        """Count an event of the scheduler: a leg's first output or beginning makes it run, its end removes it."""
        if isinstance(event, _RUNS):
            leg = event.leg
            waits = self._waits.get(leg, NOTHING)
            if waits != NOTHING:
                self._waits[leg] = NOTHING
                self.running += 1
                self._wait(leg, -waits)
                self.kv_tokens += leg.prompt_tokens
            if isinstance(event, Held) and leg in self._waits and leg not in self._held:
                self._held.add(leg)
                self.kv_pinned += leg.prompt_tokens
        elif isinstance(event, _ENDS):
            self.end(event.leg)

    def _wait(self, leg: Leg, tokens: int) -> None:
        self.waiting_tokens += tokens
        if leg.role == "decode":
            self.to_fetch_tokens += tokens


class ThreadedRunner:
    """The runner of one rank whose legs run on the scheduler's thread: the methods of `nodes.link.runner.Runner` count
    the legs and pass them on through `order` (Start, Cancel or Release), and `on_event` brings the scheduler's events
    back. This object belongs to the link's thread."""

    def __init__(self, facts: RankFacts, order: Orders) -> None:
        self.facts = facts
        self._order = order
        self._legs = LegAccounting()
        self._load = LoadUpdate()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._admitted_tokens = 0
        self._computed_tokens = 0
        self._output_tokens = 0
        self._outputs = 0  # used in place of the step count where the scheduler reports none

    def attach(self, emit: Emit) -> None:
        self._emit = emit

    def start(self, leg: Leg) -> None:
        self._legs.start(leg, self.cached_tokens(leg))
        self._prompt_tokens += leg.prompt_tokens
        self._order(leg, Start(leg))

    def cancel(self, leg: Leg) -> None:
        self._end(leg)
        self._order(leg, Cancel(leg))

    def release(self, leg: Leg) -> None:
        self._end(leg)
        self._order(leg, Release(leg))

    def cached_tokens(self, leg: Leg) -> int:
        """Return how many tokens of the prompt of a leg that comes are expected to be in the prefix cache; 0 where
        nothing is known of it."""
        return 0

    @property
    def busy(self) -> bool:
        """True while the scheduler says so in its last report."""
        return self._load.busy

    def load(self) -> Load:
        """Return the load: the legs counted here, corrected by the scheduler's last report."""
        legs, load = self._legs, self._load
        kv_tokens = max(0, legs.kv_tokens + load.kv_tokens)
        waiting_tokens = max(0, legs.waiting_tokens + load.waiting_tokens)
        return Load(
            seq=0,
            running=max(0, legs.running + load.running),
            waiting=max(0, legs.waiting + load.waiting),
            waiting_tokens=waiting_tokens,
            kv_tokens=kv_tokens,
            step=load.step or self._outputs,
            kv_capacity=0,
            max_running=0,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            output_tokens_total=self._output_tokens,
            admitted_tokens_total=self._admitted_tokens,
            computed_tokens_total=self._computed_tokens,
            kv_pinned=min(legs.kv_pinned, kv_tokens),
            to_compute_tokens=max(0, waiting_tokens - legs.to_fetch_tokens),
        )

    def turn(self, now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass

    # --- from the scheduler, on the link's thread ---------------------------------------------------------------

    def on_event(self, event: RunnerEvent) -> bool:
        """Count an event of the scheduler and emit it; an event of a leg that is over is dropped. Return false for an
        invalid one: its leg has failed."""
        if type(event) is Output and event.leg in self._legs and not _why_invalid_output(event, self.facts):
            self._outputs += 1  # one for each token, hence the short way
            self._output_tokens += len(event.tokens)
            self._legs.note(event)
            self._emit(event)
        elif isinstance(event, LoadUpdate):
            self._load = event
            self._settle()  # the report may be older than the cancel of the last leg
            self._emit(Stepped())
        elif isinstance(event, Dead):
            self._emit(event)
        elif event.leg not in self._legs:
            return True  # over meanwhile
        elif why := event.why if isinstance(event, InvalidEvent) else _why_invalid(event, self.facts):
            self.give_up(event.leg, f"the rank's scheduler gave an invalid event: {type(event).__name__}: {why}")
            return False
        else:
            assert not isinstance(event, InvalidEvent)
            if isinstance(event, Began) and event.leg not in self._legs.begun:
                self._legs.begun.add(event.leg)
                self._cached_tokens += event.cached_tokens
                self._admitted_tokens += event.leg.prompt_tokens
                if event.leg.role != "decode":  # whose prompt is fetched
                    self._computed_tokens += event.leg.prompt_tokens - event.cached_tokens
            self._legs.note(event)
            self._settle()
            self._emit(event)
        return True

    def give_up(self, leg: Leg, why: str) -> None:
        """Fail a leg, an event of which was lost or invalid, and cancel it at the scheduler."""
        if leg in self._legs:
            self.cancel(leg)
            self._emit(LegFailed(leg, "engine_failed", why))

    def _end(self, leg: Leg) -> None:
        self._legs.end(leg)
        self._settle()

    def _settle(self) -> None:
        """Set the load to zero where no leg is left, whatever the scheduler reported before."""
        if not self._legs:
            self._load = LoadUpdate(step=self._load.step)


def _why_invalid(event: LegEvent, facts: RankFacts) -> str:
    """Return why an event is invalid, or an empty string. A valid event goes out to other parts as it is."""
    vocab = facts.vocab_size or MAX_TOKEN_ID + 1
    match event:
        case Output():
            return _why_invalid_output(event, facts)
        case PromptLogprobs(leg, logprobs):
            wanted = leg.prompt_tokens - 1 if leg.params.prompt_logprobs >= 0 and not leg.offset else 0
            if len(logprobs) != wanted or leg.output:
                return f"log probabilities of {len(logprobs)} prompt tokens, {wanted} wanted before the output"
            return _why_invalid_likeliest(logprobs, leg.params.prompt_logprobs, vocab)
        case Began(leg, cached_tokens, written_tokens):
            prompt = leg.prompt_tokens
            if not 0 <= cached_tokens <= prompt:
                return f"{cached_tokens} cached tokens of a prompt of {prompt}"
            left = prompt - cached_tokens
            return "" if 0 <= written_tokens <= left else f"{written_tokens} written tokens of {left} not cached"
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


def _why_invalid_output(output: Output, facts: RankFacts) -> str:
    leg, tokens, logprobs = output.leg, output.tokens, output.logprobs
    vocab = facts.vocab_size or MAX_TOKEN_ID + 1
    if leg.role == "prefill":
        return "a prefill leg has none: its first token comes with Held"
    if len(leg.output) + len(tokens) > leg.max_tokens:
        return f"{len(leg.output) + len(tokens)} tokens where {leg.max_tokens} were asked for"
    if len(logprobs) != (len(tokens) if leg.wants_logprobs else 0):
        return f"log probabilities of {len(logprobs)} tokens for {len(tokens)}, asked: {leg.params.logprobs}"
    if why := _why_invalid_likeliest(logprobs, leg.params.logprobs, vocab):
        return why
    return f"token ids outside 0..{vocab - 1}" if tokens and not 0 <= min(tokens) <= max(tokens) < vocab else ""


def _why_invalid_likeliest(logprobs: Sequence[TokenLogprobs], most: int, vocab: int) -> str:
    for each in logprobs:
        if len(each.top) > most or not all(0 <= token < vocab for token, _ in each.top):
            return f"more likeliest tokens than {most}, or outside 0..{vocab - 1}: {each.top}"
    return ""


def event_of(leg: Leg, make: Callable[[], LegEvent]) -> LegEvent | InvalidEvent:
    """Return the event that `make` builds from what an engine gave, or InvalidEvent where it raises TypeError,
    ValueError or OverflowError. It is called on the scheduler's thread, so that no error reaches the scheduler."""
    try:
        return make()
    except (TypeError, ValueError, OverflowError) as error:
        return InvalidEvent(leg, f"{type(error).__name__}: {error}")
