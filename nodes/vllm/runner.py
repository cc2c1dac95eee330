"""vLLM as a runner: a leg (what a rank runs of a request) becomes a request of an `EngineClient`, whose outputs become
events.

`VllmRunner` lives on the link's thread; its requests run on the engine's thread, as one asyncio task a leg. This module
owns the way between the two threads and the safety of a hand-over; it starts no engine and imports no vLLM.

A prompt's KV cache is kept for a lease. After that the memory may hold another prompt's cache, and a fetch gives no
error. So the end of the lease is counted from the moment at which the prefill engine ended the request. A decode engine
that keeps its KV caches is told it, and gives no token of a fetch that ended later (`nodes.vllm.safe_pulls`). At any
other a leg whose first output comes after it fails: either the cache was fetched in time, or its tokens are not used.

Where the engines can read back, a prefill leg of whose prompt the decode rank caches more first asks for the handle of
that (`nodes.link.read_back`). Its engine reads with it under the same rule, and computes what does not come in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from bus.errors import RemoteProtocolError
from bus.runtime.intake import Mailbox
from bus.wire import codec
from bus.wire.codes import Refusal
from bus.wire.messages import Load, TokenLogprobs
from nodes.link.actions import Cancel, Release, Start
from nodes.link.leg import Leg
from nodes.link.logprobs import token_logprobs
from nodes.link.runner import (
    Began,
    CacheChanged,
    Dead,
    Fetched,
    Finished,
    HasRead,
    Held,
    KvHandle,
    LegFailed,
    Lent,
    Output,
    PromptLogprobs,
    RankFacts,
    Reads,
)
from nodes.link.threaded_runner import FELL_BEHIND, QUEUE_MAX, LegAccounting, LoadUpdate, RunnerEvent, ThreadedRunner
from nodes.vllm.events import EventRelay
from nodes.vllm.pins import Pins
from nodes.vllm.sampling import PIN, READ_UNTIL, arguments, check_ids, decoding, reasoning

STAMP_S = 1.0  # between the end of a request in the engine and the time that its last output is stamped with, at most
MIN_VALID_S = 0.001
LOAD_INTERVAL_S = 0.05
LEGS_REPORT_S = 1.0  # the requests of a dead engine end by its exception, unless the engine lost them
READ_MARGIN_S = 1.0  # what can be read for less time is computed


class Pinned(Struct, frozen=True):
    """The engine keeps what a finished leg has left, `tokens` its prompt and output, to be read by `handle`."""

    leg: Leg
    tokens: Sequence[int]
    handle: dict[str, Any]


_OF_THE_ENGINE = (LoadUpdate, Dead)
OnThread = Callable[[Callable[[], None]], None]


class Client(Protocol):
    """The part of vLLM's `EngineClient` that is used: `generate` gives a request's outputs, `errored` is true when the
    engine is dead."""

    @property
    def errored(self) -> bool: ...
    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]: ...


class VllmRunner(ThreadedRunner):
    """The runner of one rank; its methods are those of `nodes.link.runner.Runner`. `on_engine` and `on_link` run a
    function on the one thread and on the other; `sampling` and `prompt` make vLLM's arguments, `check` raises
    ValueError for sampling that a decode engine would refuse; `lease_s` is how long a KV cache is kept; `name` is
    unique among all starts of all ranks; `options` go with each request, and its priority if `prioritised`."""

    def __init__(
        self, facts: RankFacts, client: Client, *, name: str, sampling: Callable[..., Any],
        prompt: Callable[..., Any], lease_s: float, on_engine: OnThread, on_link: OnThread,
        options: Mapping[str, Any] | None = None, prioritised: bool = False,
        check: Callable[[Any], None] = lambda sampling: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(facts, self._pass_on)
        self._on_engine = on_engine
        self._client = client
        self._name = name
        self._sampling = sampling
        self._prompt = prompt
        self._check = check
        self._lease_s = lease_s
        self._on_link = on_link
        self._options = dict(options or {})
        self._prioritised = prioritised
        self._clock = clock
        self.relay: EventRelay | None = None  # of its engine's KV-cache events, where they are wanted
        self._asking: set[Leg] = set()  # prefill legs that are not in the engine yet: the decode rank has to answer
        self._pins = Pins(facts.block_tokens)
        # put in by the engine's thread, taken by the link's
        self._mailbox: Mailbox[RunnerEvent | HasRead | Pinned] = Mailbox(QUEUE_MAX)
        # After what a step has for other legs too: each turn of the link costs.
        self._mailbox.open(lambda: asyncio.get_running_loop().call_soon(self._on_link, self._take))
        self._dead = False
        self._gone_at: float | None = None  # when its engine was first seen to be dead
        # the engine's thread alone:
        self._known = LegAccounting()
        self._tasks: dict[Leg, asyncio.Task[None]] = {}
        self._steps = 0
        self._kv_usage = 0.0
        self._load_sent_at = 0.0

    # --- the link's thread ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while a request runs in the engine."""
        return bool(self._tasks)

    def load(self) -> Load:
        """Return the load: legs as counted at ingest, steps and KV memory in use as the engine reports them, what is
        pinned included. A held leg needs no step."""
        load, pinned = super().load(), self._pins.tokens
        kv_pinned = (load.kv_pinned or 0) + pinned
        return replace(load, step=self._steps, kv_tokens=max(load.kv_tokens, pinned), kv_pinned=kv_pinned)

    def cached_tokens(self, leg: Leg) -> int:
        """Return how many tokens of a prompt its engine has cached, as far as it has said, or is to read back. For log
        probabilities of the prompt it computes all."""
        return max(self._tokens_here(leg), self._tokens_to_read(leg))

    def _tokens_here(self, leg: Leg) -> int:
        if self.relay is None or leg.params.prompt_logprobs >= 0:
            return 0
        return self.relay.cached_tokens(leg.prompt, leg.params.cache_salt)

    def _tokens_to_read(self, leg: Leg) -> int:
        """Return how many tokens of the prompt the decode rank is thought to have, in whole blocks."""
        size = self.facts.block_tokens
        return leg.read_tokens // size * size if leg.read_tokens else 0

    def tick(self, now: float) -> None:
        """Check that the engine lives: one that dies while idle raises nothing. Otherwise its legs give the reason,
        a moment later."""
        self._pins.expire(time.perf_counter())
        if self.relay is not None:
            self.relay.tick()
        if self._client.errored:
            self._gone_at = now if self._gone_at is None else self._gone_at
            if not self._tasks or now - self._gone_at > LEGS_REPORT_S:
                self._take()  # the last of them may just have reported it
                self._die("vLLM's engine core is gone")

    def cache_changed(self, messages: Sequence[tuple[bytes, bytes, bytes]]) -> None:
        """Publish KV-cache events of the engine; its EventRelay calls it, on the link's thread."""
        self._emit(CacheChanged(messages))

    def restate_cache(self) -> None:
        """Publish the whole cache again: a controller does not know it."""
        if self.relay is not None:
            self.relay.restate()

    # read back

    def readable(self, leg: Leg, blocks: int, now: float) -> None:
        """Start a leg that asked its decode rank: it reads what the handle is good for, or nothing. Its engine asks no
        more, so a later answer has no effect."""
        if leg not in self._asking:
            return
        self._asking.discard(leg)
        handle = leg.handle
        lacks = blocks * self.facts.block_tokens - self._tokens_here(leg)
        if lacks > 0 and handle is not None and handle.valid_until - now >= READ_MARGIN_S:
            leg.read_tokens = lacks
        else:
            leg.handle, leg.read_tokens = None, 0
            self._legs.end(leg)
            self._legs.start(leg, self.cached_tokens(leg))  # again: all that is not here is work
            self._emit(HasRead(leg, 0))
        self._pass_on(leg, Start(leg))

    def lend(self, leg: Leg) -> None:
        """Give the handle of what the engine pins of a decode leg's prompt; nothing else of it can be read."""
        now = time.perf_counter()
        lent = self._pins.lend(leg, leg.client, leg.prompt, leg.params.cache_salt, now)
        self._emit(Lent(leg, 0) if lent is None else Lent(leg, lent.blocks, lent.handle, lent.until - now))

    def reclaim(self, leg: Leg) -> None:
        """Count what was lent as pinned no longer: the engine frees it when it was read, or its time is over."""
        self._pins.returned(leg)

    def _pass_on(self, leg: Leg, order: Start | Cancel | Release) -> None:
        """Pass an order on to the engine's thread. A leg that can read more than is here asks for that first."""
        reads = isinstance(order, Start) and leg.read_tokens and leg.handle is None
        if reads and self._tokens_to_read(leg) > self._tokens_here(leg):
            self._asking.add(leg)
            self._emit(Reads(leg))
            return
        self._asking.discard(leg)
        self._on_engine(lambda: self._ordered(leg, order))

    def _take(self) -> None:
        for event in self._mailbox.take():
            if isinstance(event, Dead):
                self._die(event.reason)
            elif isinstance(event, Pinned):
                leg, now = event.leg, time.perf_counter()
                self._pins.add(leg.client, event.tokens, leg.params.cache_salt, event.handle, now)
            elif isinstance(event, HasRead):
                self._emit(event)
            elif isinstance(event, Held):  # in the mailbox `valid_s` holds the end of its lease, not its length
                left_s = max(MIN_VALID_S, event.valid_s - self._clock())
                self.on_event(Held(event.leg, event.first_token, event.handle, left_s))
            else:
                self.on_event(event)
        for leg in self._mailbox.spilled():
            self.give_up(leg, FELL_BEHIND)

    def _die(self, reason: str) -> None:
        if not self._dead:
            self._dead = True
            self.on_event(Dead(reason))

    # --- the engine's thread --------------------------------------------------------------------------------------

    def stepped(self, kv_usage: float) -> None:
        """Count a step of the engine, on the engine's thread, and report the load now and then. `kv_usage`: the part of
        its KV memory that is in use, 0 to 1."""
        self._steps += 1
        now = self._clock()
        if kv_usage == self._kv_usage and now - self._load_sent_at < LOAD_INTERVAL_S:
            return  # an engine that waits for a KV cache steps a thousand times a second
        self._kv_usage, self._load_sent_at = kv_usage, now
        kv_tokens = round(kv_usage * self.facts.kv_capacity)
        self._enqueue(LoadUpdate(kv_tokens=kv_tokens - self._known.kv_tokens))

    def _enqueue(self, event: RunnerEvent | HasRead | Pinned) -> None:
        if isinstance(event, HasRead | Pinned):
            self._mailbox.put(event)  # a read that is not reported ends with its leg
            return
        if not isinstance(event, _OF_THE_ENGINE):
            self._known.note(event)
        leg = None if isinstance(event, _OF_THE_ENGINE) else event.leg
        self._mailbox.put(event, spills=leg, always=isinstance(event, Dead))

    def _ordered(self, leg: Leg, order: Start | Cancel | Release) -> None:
        if isinstance(order, Start):
            self._known.start(leg)
            self._tasks[leg] = asyncio.get_running_loop().create_task(self._run(leg))
        else:
            self._known.end(leg)
            task = self._tasks.pop(leg, None)
            if task is not None:
                task.cancel()  # which aborts the request; where its KV cache was not fetched yet, that frees it too

    async def _run(self, leg: Leg) -> None:
        try:
            await (self._prefill(leg) if leg.role == "prefill" else self._decode(leg))
        except Refusal as refusal:
            self._enqueue(LegFailed(leg, refusal.code, refusal.sentence))
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())[:500]
            if self._client.errored:
                self._enqueue(Dead(why))
            else:
                self._enqueue(LegFailed(leg, "bad_request" if _is_callers(error) else "engine_failed", why))
        finally:
            self._tasks.pop(leg, None)

    def _generate(self, leg: Leg, handle: dict[str, Any] | None = None) -> AsyncGenerator[Any, None]:
        """Start a request under a name of the engine's own: its connector might read the request's name as two."""
        options = {**self._options, "priority": -leg.priority} if self._prioritised else self._options
        if leg.params.needs:
            check_ids(leg.params, self.facts.vocab_size)
            options = {**options, **reasoning(leg, self.facts.params)}
            if leg.role == "prefill":  # what decode would refuse is not worth computing
                self._check(self._sampling(**decoding(leg)))
        params = self._sampling(**arguments(leg, handle))
        salted = (leg.params.cache_salt,) if leg.params.cache_salt else ()
        prompt = self._prompt(leg.prompt.tolist(), *salted)
        return self._client.generate(prompt, params, f"{self._name}-{leg.seq}", **options)

    async def _prefill(self, leg: Leg) -> None:
        began, out = self._clock(), None
        given = self._to_read(leg)
        async with aclosing(self._generate(leg, given)) as outputs:
            async for each in outputs:
                out = each
        if out is None or not out.outputs[0].token_ids or not out.kv_transfer_params:
            how = out.outputs[0].finish_reason if out is not None else "nothing"
            raise RuntimeError(f"vLLM handed no KV cache over: its request ended with {how}")
        stamped = getattr(out.metrics, "last_token_ts", 0.0)
        ended = stamped - STAMP_S if began <= stamped <= self._clock() else began
        self._enqueue(_began(leg, out))
        if leg.handle is not None:
            came = given is not None and out.num_cached_tokens >= given["remote_num_tokens"]
            self._enqueue(HasRead(leg, leg.read_tokens if came else 0))
        handle = codec.pack(out.kv_transfer_params)
        self._enqueue(Held(leg, out.outputs[0].token_ids[0], handle, ended + self._lease_s))

    def _to_read(self, leg: Leg) -> dict[str, Any] | None:
        """Return the parameters of what a prefill leg reads back; None: nothing, as where the handle is not what the
        decode rank's answer says."""
        handle = leg.handle
        if handle is None:
            return None
        try:
            given = _unpacked(handle.data)
        except Refusal:
            return None
        tokens, blocks = handle.blocks * self.facts.block_tokens, given.get("remote_block_ids")
        if not isinstance(blocks, list) or [len(each) for each in blocks if isinstance(each, list)] != [handle.blocks]:
            return None
        if given.get("remote_num_tokens") != tokens or tokens >= leg.prompt_tokens:
            return None
        return given | {"do_remote_decode": True, "do_remote_prefill": False, READ_UNTIL: self._read_until(handle)}

    def _read_until(self, handle: KvHandle) -> float:
        """Return until when a handle is good, on the clock of the engine's processes."""
        return time.perf_counter() + handle.valid_until - self._clock()

    async def _decode(self, leg: Leg) -> None:
        handle, began, came = leg.handle, self._clock(), False
        given = None if handle is None else _unpacked(handle.data)
        keeps_cache, lends = self.facts.prefills, self.facts.reads_back
        made: list[int] = leg.prompt.tolist() if lends else []
        if given is not None and handle is not None and keeps_cache:
            given[READ_UNTIL] = self._read_until(handle)
        elif lends:
            given = dict(PIN)
        async with aclosing(self._generate(leg, given)) as outputs:
            async for out in outputs:
                completion = out.outputs[0]
                tokens = completion.token_ids
                if tokens and not came:
                    came = True
                    if handle is not None:
                        if self._clock() >= handle.valid_until and not keeps_cache:
                            raise Refusal("kv_failed", "the KV cache came so late that it may be another prompt's")
                        cached = out.num_cached_tokens if keeps_cache else 0
                        self._enqueue(Fetched(leg, self._clock() - began, cached, to_first_token=True))
                        self._enqueue(Began(leg, cached))
                    else:
                        self._enqueue(_began(leg, out))
                    if leg.params.prompt_logprobs >= 0 and not leg.offset:
                        likely = out.prompt_logprobs[1:]  # the first is None
                        found = _likelihoods(leg.prompt.tolist()[1:], likely, leg.params.prompt_logprobs)
                        self._enqueue(PromptLogprobs(leg, tuple(found)))
                if tokens:
                    self._enqueue(Output(leg, tuple(tokens), _logprobs(completion, leg.params.logprobs)))
                    made += tokens
                reason = completion.finish_reason
                if reason in ("stop", "length"):
                    if lends and out.kv_transfer_params:
                        self._enqueue(Pinned(leg, made, out.kv_transfer_params))
                    self._enqueue(Finished(leg, reason))
                elif reason is not None:
                    if handle is not None and not came:
                        raise Refusal("kv_failed", f"vLLM did not fetch the KV cache ({reason})")
                    raise Refusal("engine_failed", f"vLLM gave the request up ({reason})")


def _began(leg: Leg, output: Any) -> Began:
    """Return the event of a prompt that this engine has computed. An older vLLM does not say what it has written."""
    return Began(leg, output.num_cached_tokens or 0, getattr(output, "num_cache_creation_tokens", None) or 0)


def _logprobs(completion: Any, top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of one output's tokens."""
    return [] if top < 0 else _likelihoods(completion.token_ids, completion.logprobs, top)


def _likelihoods(tokens: Sequence[int], logprobs: Sequence[Any], top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of `tokens`. vLLM names a place's own token first, then the most likely ones, in
    their order."""
    found = []
    for token, likely in zip(tokens, logprobs, strict=True):
        likeliest = sorted((each for each in likely.items() if each[1].rank <= top), key=lambda each: each[1].rank)
        own = likely[token]
        found.append(token_logprobs(own.logprob, ((other, it.logprob) for other, it in likeliest), own.rank))
    return found


def _is_callers(error: Exception) -> bool:
    """Return true if vLLM says that the request is invalid: newer versions use a class of their own, which is no
    ValueError."""
    return isinstance(error, ValueError) or any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)


def _unpacked(handle: bytes) -> dict[str, Any]:
    try:
        given = codec.unpack(handle)
    except RemoteProtocolError as error:
        raise Refusal("kv_failed", f"the handle can't be read: {error}") from None
    if not isinstance(given, dict):
        raise Refusal("kv_failed", "the handle is no map")
    return given
