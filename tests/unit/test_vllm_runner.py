"""Our runner of vLLM over a client that behaves as vLLM's (tests/support/fake_vllm.py): events, traps, load, ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import pytest
from fake_vllm import BLOCK, CAPACITY, DEADLY, VOCAB, FakeClient, runner_of

from bus.wire.codec import encode
from bus.wire.hashing import token_bytes
from bus.wire.messages import Dispatch, Location, Params, Role, TokenLogprobs
from nodes.link.leg import Leg, leg_of
from nodes.link.runner import (
    FOR_EVER,
    Began,
    CacheChanged,
    Dead,
    Event,
    Fetched,
    Finished,
    Held,
    KvHandle,
    LegFailed,
    Output,
    PromptLogprobs,
    Stepped,
)
from nodes.own.engines.sim import sim_generate
from nodes.vllm.events import EventRelay
from nodes.vllm.sampling import READ_UNTIL

T = TypeVar("T")
PROMPT = list(range(7, 23))  # fills a block, which is what kills a decode engine that is given one token more
LEASE_S = 30.0


class Node:
    """One runner on one asyncio loop, which is both threads; what it says is kept."""

    def __init__(
        self, role: Role, folder: Path, *, keeps: bool = False, reads_back: bool = False, **changes: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self.role: Role = role
        self.client = FakeClient(folder, role, LEASE_S)
        self.client.keeps, self.client.reads_back = keeps, reads_back
        self.events: list[Event] = []
        self.late_s = 0.0  # of this machine's clock, as the runner reads it
        self.link: Callable[[Callable[[], None]], Any] = loop.call_soon
        self.runner = runner_of(
            self.client, role, LEASE_S, on_engine=loop.call_soon, on_link=lambda f: self.link(f),
            clock=lambda: time.monotonic() + self.late_s, **changes,
        )  # fmt: skip
        self.runner.attach(self.events.append)
        self._seq = 0

    def leg(self, prompt: list[int] = PROMPT, handle: KvHandle | None = None, params: Params | None = None,
            **changes: Any) -> Leg:  # fmt: skip
        self._seq += 1
        fields: dict[str, Any] = {
            "rid": "r,1", "attempt": 1, "leg": self.role, "dp_rank": 0, "controller_epoch": 7, "number": 1,
            "charge": 0, "prompt_tokens": len(prompt), "max_tokens": 6, "bootstrap_room": 5,
        } | changes  # fmt: skip
        frames = [token_bytes(prompt), encode(params or Params())]
        leg = leg_of(Dispatch(**fields), frames, role=self.role, dp_rank=0, facts=self.runner.facts, now=0.0)
        leg.seq, leg.handle = self._seq, handle
        return leg

    def start(self, *args: Any, **changes: Any) -> Leg:
        leg = self.leg(*args, **changes)
        self.runner.start(leg)
        return leg

    async def until(self, kind: type[T], count: int = 1) -> T:
        """The `count`-th event of `kind`."""
        async with asyncio.timeout(60):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                await asyncio.sleep(0.001)
        return found[count - 1]

    async def asked(self, count: int) -> dict[str, Any]:
        """The handle of the `count`-th request that its engine was given."""
        async with asyncio.timeout(60):
            while len(self.client.asked) < count:
                await asyncio.sleep(0)
        given: dict[str, Any] = self.client.asked[count - 1][0]["extra_args"]["kv_transfer_params"]
        return given

    def said(self) -> list[str]:
        return [type(event).__name__ for event in self.events if not isinstance(event, Stepped)]

    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Output) for token in event.tokens]


def both(scenario: Callable[[Node, Node], Coroutine[Any, Any, None]], folder: Path) -> None:
    async def run() -> None:
        await scenario(Node("prefill", folder), Node("decode", folder))

    asyncio.run(run())


def handle_of(held: Held, valid_until: float = FOR_EVER) -> KvHandle:
    return KvHandle(Location("p", 0, 1, "p"), 1, held.first_token, 0, held.handle, valid_until)


def test_a_pair_hands_over_and_decode_computes_no_prompt_token(tmp_path: Path) -> None:
    """Decode gets the prompt and no token more (trap: its engine would die of it)."""

    async def scenario(prefill: Node, decode: Node) -> None:
        prefill.start()
        held = await prefill.until(Held)
        assert prefill.said() == ["Began", "Held"]
        assert Began(held.leg, 0, 16) in prefill.events
        assert held.first_token == sim_generate(PROMPT, 1, VOCAB)[0]
        decode.start(handle=handle_of(held))
        assert (await decode.until(Finished)).reason == "length"
        assert decode.said() == ["Fetched", "Began", *["Output"] * 6, "Finished"]
        assert decode.tokens() == sim_generate(PROMPT, 6, VOCAB)
        assert (prefill.client.computed, decode.client.computed) == (len(PROMPT), 0)
        assert not prefill.client.live
        assert not decode.client.live

    both(scenario, tmp_path)


def test_the_lease_is_counted_from_the_end_of_the_request_in_the_engine(tmp_path: Path) -> None:
    """Not from when the link heard of it: it may have stood still."""

    async def scenario(prefill: Node, decode: Node) -> None:
        prefill.start()
        held = await prefill.until(Held)
        assert LEASE_S - 2.0 < held.valid_s < LEASE_S

        waiting: list[Callable[[], None]] = []
        prefill.link = waiting.append
        prefill.start()
        async with asyncio.timeout(60):
            while not waiting or prefill.client.live:
                await asyncio.sleep(0.001)
        prefill.late_s = 20.0
        waiting[0]()
        assert (await prefill.until(Held, 2)).valid_s < LEASE_S - 20.0
        prefill.late_s = 100.0
        prefill.link = asyncio.get_running_loop().call_soon
        prefill.start()
        assert 0 < (await prefill.until(Held, 3)).valid_s < LEASE_S

    both(scenario, tmp_path)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_kv_cache_that_comes_after_its_lease_is_not_used(tmp_path: Path, fenced: bool) -> None:
    """The control shows what it would give: another prompt's tokens, and no error."""

    async def scenario(prefill: Node, decode: Node) -> None:
        prefill.start()
        first = handle_of(await prefill.until(Held), time.monotonic() if fenced else FOR_EVER)
        prefill.client.clock = lambda: time.monotonic() + LEASE_S  # now its slots are free
        for number in range(4):
            prefill.start([number + 100, 9])
        await prefill.until(Held, 5)
        leg = decode.start(handle=first)
        if fenced:
            failed = await decode.until(LegFailed)
            assert (failed.leg, failed.code) == (leg, "kv_failed")
            assert decode.said() == ["LegFailed"]
            assert not decode.client.live
        else:
            await decode.until(Finished)
            assert decode.tokens() != sim_generate(PROMPT, 6, VOCAB)

    both(scenario, tmp_path)


def keeping(scenario: Callable[[Node, Node], Coroutine[Any, Any, None]], folder: Path) -> None:
    """As `both`, and decode keeps its KV caches."""

    async def run() -> None:
        await scenario(Node("prefill", folder), Node("decode", folder, keeps=True))

    asyncio.run(run())


def test_an_engine_that_keeps_kv_caches_is_told_the_end_of_the_lease_on_its_clock(tmp_path: Path) -> None:
    async def scenario(prefill: Node, decode: Node) -> None:
        prefill.start()
        held = await prefill.until(Held)
        decode.late_s = 1000.0  # the node's clock is not the engine's
        for number, left_s in enumerate((20.0, FOR_EVER), 1):
            decode.start(handle=handle_of(held, time.monotonic() + 1000.0 + left_s))
            given = dict(await decode.asked(number))
            said_s = given.pop(READ_UNTIL) - time.perf_counter()
            assert said_s == left_s or left_s - 1.0 < said_s <= left_s
            assert given == msgpack.unpackb(held.handle)
        await decode.until(Finished, 2)
        decode.late_s = 0.0
        decode.start(handle=handle_of(held, time.monotonic() + 0.001))  # over before it is fetched
        assert (await decode.until(LegFailed)).code == "kv_failed"
        assert len(decode.tokens()) == 12, "of the first two"

    keeping(scenario, tmp_path)


def test_what_was_fetched_in_time_is_used_however_late_the_first_token_comes(tmp_path: Path) -> None:
    """Where the engine itself watches the fetch. Elsewhere the leg fails: nobody can tell."""

    async def scenario(prefill: Node, decode: Node) -> None:
        prefill.start()
        held = await prefill.until(Held)
        decode.start(handle=handle_of(held, time.monotonic() + 10.0))
        await decode.asked(1)
        decode.late_s = 20.0
        if decode.client.keeps:
            await decode.until(Finished)
            assert decode.tokens() == sim_generate(PROMPT, 6, VOCAB)
        else:
            assert (await decode.until(LegFailed)).code == "kv_failed"

    keeping(scenario, tmp_path / "keeps")
    both(scenario, tmp_path / "does_not")


def test_each_trip_says_what_was_cached_and_counts_what_is_computed(tmp_path: Path) -> None:
    """A pair's decode leg fetches what it lacks and computes nothing; a leg of its own computes what it lacks. The
    prompt fills its blocks, of which the last token is computed all the same."""

    async def scenario(prefill: Node, decode: Node) -> None:
        prompt = list(range(7, 7 + 4 * BLOCK))

        async def turn(number: int, *, pair: bool) -> tuple[int, int]:
            handle = None
            if pair:
                prefill.start(prompt)
                handle = handle_of(await prefill.until(Held, number))
            decode.start(prompt, handle=handle, leg="decode" if pair else "unified")
            load = decode.runner.load()
            assert load.waiting_tokens > 0
            assert load.to_compute_tokens == (0 if pair else load.waiting_tokens)
            await decode.until(Finished, number)
            assert decode.tokens()[-6:] == sim_generate(prompt, 6, VOCAB)
            load = decode.runner.load()
            assert (load.waiting_tokens, load.running) == (0, 0)
            return (await decode.until(Began, number)).cached_tokens, load.computed_tokens_total

        assert await turn(1, pair=True) == (0, 0)
        assert await turn(2, pair=True) == (3 * BLOCK, 0)
        fetched = await decode.until(Fetched, 2)
        assert (fetched.cached_tokens, fetched.to_first_token) == (3 * BLOCK, True)
        assert await turn(3, pair=False) == (3 * BLOCK, BLOCK)
        prompt += [*sim_generate(prompt, 6, VOCAB), 1, 2, 3]
        assert await turn(4, pair=False) == (4 * BLOCK, BLOCK + 9)
        assert decode.client.computed == BLOCK + 9
        load = decode.runner.load()
        assert load.cached_tokens_total == 10 * BLOCK
        assert load.admitted_tokens_total == 16 * BLOCK + 9

    keeping(scenario, tmp_path)


def test_what_is_cached_of_a_prompt_does_not_wait(tmp_path: Path) -> None:
    """As far as the engine has told; for log probabilities of the prompt it computes all the same."""

    async def scenario() -> None:
        node = Node("unified", tmp_path)
        relay = node.runner.relay = EventRelay("u", 0, lambda frames: None)
        prompt = list(range(7, 7 + 3 * BLOCK))
        event = {
            "type": "BlockStored", "block_hashes": [b"a", b"b"], "parent_block_hash": None, "lora_id": None,
            "token_ids": prompt[: 2 * BLOCK], "block_size": BLOCK, "medium": "GPU",
        }  # fmt: skip
        relay.received([b"", bytes(8), msgpack.packb([0.0, [event], 0])])
        legs = [node.start(prompt, max_tokens=300), node.start(prompt, params=Params(prompt_logprobs=0))]
        legs.append(node.start(prompt, params=Params(cache_salt="other")))
        assert node.runner.load().waiting_tokens == 7 * BLOCK
        await node.until(Output)
        node.runner.cancel(legs[2])
        await node.until(Finished)
        load = node.runner.load()
        assert (load.waiting_tokens, load.waiting, load.running) == (0, 0, 1)
        node.runner.cancel(legs[0])
        assert node.runner.load().kv_tokens == 0

    asyncio.run(scenario())


def test_a_kv_cache_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    async def scenario(prefill: Node, decode: Node) -> None:
        handle = msgpack.packb({"do_remote_prefill": True, "at": str(tmp_path / "nowhere")})
        for data in (handle, b"", b"\xc1", msgpack.packb([1])):  # what a peer hands over may be anything
            decode.start(handle=handle_of(Held(decode.leg(), 1, data)))
        for number in range(1, 5):
            assert (await decode.until(LegFailed, number)).code == "kv_failed"
        prefill.client._decode = None  # type: ignore[assignment]
        prefill.start([1, 2])
        assert (await prefill.until(Held)).valid_s > 0

    both(scenario, tmp_path)


@pytest.mark.parametrize("role", ["prefill", "unified"])
def test_a_cancel_at_any_moment_ends_the_request_in_the_engine(tmp_path: Path, role: Role) -> None:
    async def scenario() -> None:
        node = Node(role, tmp_path)
        for number in range(12):
            leg = node.start(max_tokens=50)
            await asyncio.sleep(number * 0.002)
            node.runner.cancel(leg)
            async with asyncio.timeout(60):
                while node.client.live:
                    await asyncio.sleep(0.001)
        load = node.runner.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.kv_tokens) == (0, 0, 0, 0)
        assert not [event for event in node.events if isinstance(event, LegFailed)]

    asyncio.run(scenario())


@pytest.mark.parametrize("idle", [True, False])
def test_an_engine_that_is_dead_for_good_is_said_to_be_once(tmp_path: Path, idle: bool) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path)
        if idle:
            node.client.errored = True
        else:
            node.start(max_tokens=400)
            await node.until(Output)
            node.start([9, DEADLY])
        for _ in range(20):
            node.runner.tick(0.0)
            await asyncio.sleep(0.003)
        said = [event.reason for event in node.events if isinstance(event, Dead)]
        assert said == ["vLLM's engine core is gone" if idle else "EngineDeadError: EngineCore encountered an issue"]

    asyncio.run(scenario())


def test_an_engine_that_is_dead_and_lets_its_requests_hang_is_said_to_be_in_a_second(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path)
        node.start(max_tokens=4)
        await asyncio.sleep(0)  # it runs, and says nothing more while nothing is awaited
        node.client.errored = True
        for now in (5.0, 5.9):
            node.runner.tick(now)
            assert not [event for event in node.events if isinstance(event, Dead)]
        node.runner.tick(6.1)
        assert [event.reason for event in node.events if isinstance(event, Dead)] == ["vLLM's engine core is gone"]

    asyncio.run(scenario())


def test_load_is_exact_at_ingest_and_kv_memory_is_the_engines(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path)
        leg = node.start(max_tokens=300)
        other = node.start([1, 2, 3], max_tokens=300)
        load = node.runner.load()  # nothing has been said by the engine yet
        assert (load.running, load.waiting, load.waiting_tokens) == (0, 2, len(PROMPT) + 3)
        await node.until(Output, 2)
        node.client.stepped(0, 0.5)
        node.runner._take()
        load = node.runner.load()
        assert (load.running, load.waiting, load.waiting_tokens) == (2, 0, 0)
        assert load.kv_tokens == CAPACITY // 2
        assert node.runner.busy
        assert load.step > 0
        node.runner.cancel(leg)
        assert node.runner.load().kv_tokens == CAPACITY // 2 - len(PROMPT), "what is known to have ended is taken off"
        node.runner.cancel(other)
        await asyncio.sleep(0.01)
        load = node.runner.load()  # the engine's figures stand still when it idles
        assert (load.running, load.waiting, load.kv_tokens, node.runner.busy) == (0, 0, 0, False)

    asyncio.run(scenario())


def test_what_the_engine_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path, options={"data_parallel_rank": 3}, prioritised=True)
        params = Params(temperature=0.5, top_k=9, top_p=0.25, seed=44, stop_token_ids=(3, 5))
        node.start(params=params, offset=2, priority=6)
        await node.until(Finished)
        asked, options = node.client.asked[0]
        assert asked == {
            "max_tokens": 6, "temperature": 0.5, "top_k": 9, "top_p": 0.25, "stop_token_ids": [3, 5],
            "ignore_eos": True, "detokenize": False, "seed": 46,
        }  # fmt: skip
        assert options == {"data_parallel_rank": 3, "priority": -6}, "in vLLM the lower goes first"
        greedy = node.start(params=Params(seed=44))
        await node.until(Finished, 2)
        assert "seed" not in node.client.asked[1][0], f"{greedy.rid}: a generator of its own costs, and changes nothing"
        node.start(params=Params(temperature=1.0, seed=44, seed_drawn=True))
        await node.until(Finished, 3)
        assert "seed" not in node.client.asked[2][0], "nor does one that nobody chose"

    asyncio.run(scenario())


RESUMED = [
    ({"min_p": 0.1, "repetition_penalty": 1.5}, {"min_p": 0.1, "repetition_penalty": 1.5}),
    ({"min_tokens": 5}, {"min_tokens": 3}),
    ({"min_tokens": 1}, {"min_tokens": 0}),
    ({"logit_bias": ((7, -100.0),)}, {"logit_bias": {7: -100.0}}),
    ({"presence_penalty": 0.5}, "presence_penalty can't be resumed"),
    ({"frequency_penalty": 0.5, "ebnf": "x"}, "ebnf, frequency_penalty can't be resumed"),
    ({"json_schema": "{}"}, "json_schema can't be resumed"),
    ({"json_schema": "{}", "offset": 0}, {"structured_outputs": {"json": "{}"}}),
    ({"ebnf": "x", "regex": "y", "offset": 0}, "one at most"),
    ({"structural_tag": "{}", "offset": 0}, {"structured_outputs": {"structural_tag": "{}"}}),
    ({"structural_tag": "{}"}, "structural_tag can't be resumed"),
    ({"choice": ("a", "b"), "offset": 0}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"choice": ("a", "b")}, "choice can't be resumed"),
    ({"bad_words": ((7,), (8,)), "allowed_token_ids": (3, 9)}, {"bad_words": [[7], [8]], "allowed_token_ids": [3, 9]}),
    ({"bad_words": ((7,), (8, 9)), "offset": 0}, {"bad_words": [[7], [8, 9]]}),
    ({"bad_words": ((7,), (8, 9))}, "bad_words of several tokens can't be resumed"),
    ({"bad_words": ((VOCAB,),)}, "a token id outside 0..511"),
    ({"thinking_token_budget": 0, "offset": 0}, {"thinking_token_budget": 0}),
    ({"thinking_token_budget": 5}, "thinking_token_budget can't be resumed"),
    ({"reasoning_parser_kwargs": "[]", "offset": 0}, "reasoning_parser_kwargs: "),
    ({"reasoning_parser_kwargs": "{", "offset": 0}, "reasoning_parser_kwargs: "),
]


@pytest.mark.parametrize(("given", "expected"), RESUMED)
def test_what_does_not_survive_a_resume_is_refused(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any] | str
) -> None:
    """The prompt of a resumed leg ends with the output so far, which vLLM can't know."""
    given = dict(given)
    offset = given.pop("offset", 2)

    async def scenario() -> None:
        node = Node("unified", tmp_path)
        leg = node.start(params=Params(**given), offset=offset)
        if isinstance(expected, str):
            failed = await node.until(LegFailed)
            assert (failed.leg, failed.code) == (leg, "bad_request")
            assert expected in failed.message
            assert not node.client.asked
        else:
            await node.until(Finished)
            asked, _ = node.client.asked[0]
            assert asked == asked | expected

    asyncio.run(scenario())


def test_a_salt_and_the_reasoning_go_beside_the_parameters(tmp_path: Path) -> None:
    async def scenario() -> None:
        given = Params(
            cache_salt="tenant", reasoning_parser="qwen3", reasoning_ended=False, reasoning_parser_kwargs='{"a": true}',
            json_schema="{}",
        )  # fmt: skip
        told = {"reasoning_ended": False, "reasoning_parser_kwargs": {"a": True}}
        for role, options in (("unified", told), ("prefill", {})):
            node = Node(role, tmp_path)
            node.start(params=given)
            await node.until(Held if role == "prefill" else Finished)
            assert node.client.asked[0][1] == options
            assert node.client.salts == ["tenant"], "it parts the prefix caches of prefill ranks too"
        node = Node("unified", tmp_path)
        node.start(params=Params(reasoning_parser="qwen3", reasoning_ended=False), offset=2)
        await node.until(Finished)
        assert node.client.asked[0][1] == {}, "it may have ended in the output so far"
        assert node.client.salts == [None]

    asyncio.run(scenario())


def test_a_grammar_of_a_caller_without_a_parser_is_for_the_whole_output(tmp_path: Path) -> None:
    """Or an engine with a parser would wait for the end of a reasoning."""

    async def scenario() -> None:
        for parser, told in (("", {"reasoning_ended": True}), ("qwen3", {})):
            node = Node("unified", tmp_path)
            node.start(params=Params(json_schema="{}", reasoning_parser=parser))
            await node.until(Finished)
            assert node.client.asked[0][1] == told

    asyncio.run(scenario())


def test_log_probabilities_of_the_prompt_are_its_tokens_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path)
        node.start(params=Params(prompt_logprobs=1))
        await node.until(Finished)
        (event,) = [each for each in node.events if isinstance(each, PromptLogprobs)]
        assert node.events.index(event) < node.events.index(await node.until(Output))
        expected = [TokenLogprobs(-1.0 - t / VOCAB, (((t + 1) % VOCAB, -0.25),), 2) for t in PROMPT[1:]]
        assert list(event.logprobs) == expected
        node.start(params=Params(prompt_logprobs=1), offset=2)
        await node.until(Finished, 2)
        assert len([each for each in node.events if isinstance(each, PromptLogprobs)]) == 1, "the client has them"

    asyncio.run(scenario())


def test_a_prefill_leg_samples_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("prefill", tmp_path)
        node.start(params=Params(temperature=2.0, seed=3, json_schema="{}", min_tokens=4))
        await node.until(Held)
        asked, _ = node.client.asked[0]
        assert asked.pop("extra_args")["kv_transfer_params"]["do_remote_decode"]
        assert asked == {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}

    asyncio.run(scenario())


@pytest.mark.parametrize("top", [0, 1, 3])
def test_log_probabilities_of_the_chosen_token_and_of_the_likeliest(tmp_path: Path, top: int) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path)
        node.start(params=Params(logprobs=top))
        await node.until(Finished)
        asked, _ = node.client.asked[0]
        assert asked["logprobs"] == top
        said = [each for event in node.events if isinstance(event, Output) for each in event.logprobs]
        assert len(said) == 6
        for token, each in zip(node.tokens(), said, strict=True):
            chosen = -1.0 - token / VOCAB
            likeliest = ((token + 1) % VOCAB, -0.25), (token, chosen), ((token + 3) % VOCAB, -9999.0)
            assert each == TokenLogprobs(chosen, likeliest[:top], 2)

    asyncio.run(scenario())


class VLLMClientError(Exception):
    """As newer versions raise it."""


class VLLMValidationError(VLLMClientError):
    pass


@pytest.mark.parametrize("kind", [ValueError, VLLMValidationError])
def test_a_parameter_that_vllm_refuses_is_the_callers_mistake(tmp_path: Path, kind: type[Exception]) -> None:
    def refuse(**arguments: Any) -> Any:
        raise kind("top_k must be 0 (disable), or at least 1, got -5.")

    async def scenario() -> None:
        node = Node("unified", tmp_path, sampling=refuse)
        node.start()
        failed = await node.until(LegFailed)
        assert failed.code == "bad_request"
        assert "top_k must be 0" in failed.message

    asyncio.run(scenario())


@pytest.mark.parametrize("given", [{"json_schema": "{"}, {}])
def test_prefill_computes_nothing_for_a_request_that_decode_would_refuse(tmp_path: Path, given: dict[str, Any]) -> None:
    def check(sampling: dict[str, Any]) -> None:
        raise ValueError(f"no schema: {sampling['structured_outputs']['json']}")

    async def scenario() -> None:
        node = Node("prefill", tmp_path, check=check)
        leg = node.start(params=Params(**given))
        if given:
            failed = await node.until(LegFailed)
            assert (failed.leg, failed.code) == (leg, "bad_request")
            assert "no schema: {" in failed.message
            assert not node.client.asked
        else:  # most requests, for which nothing is checked
            await node.until(Held)

    asyncio.run(scenario())


def test_cache_events_pass(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("prefill", tmp_path)
        node.runner.cache_changed([(b"kv/p/0/", b"\0" * 8, b"x")])
        assert (await node.until(CacheChanged)).messages == [(b"kv/p/0/", b"\0" * 8, b"x")]
        assert node.said() == ["CacheChanged"]

    asyncio.run(scenario())


def test_many_outputs_wake_the_link_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = Node("unified", tmp_path)
        wakes: list[Callable[[], None]] = []
        node.link = wakes.append
        node.start(max_tokens=20)
        async with asyncio.timeout(60):
            while node.client.asked == [] or node.client.live:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert len(wakes) == 1
        wakes[0]()
        assert node.tokens() == sim_generate(PROMPT, 20, VOCAB)
        assert isinstance(node.events[-1], Finished | Stepped)
        assert not [event for event in node.events if isinstance(event, Fetched)], "unified: nothing to fetch"
        assert isinstance(await node.until(Began), Began)

    asyncio.run(scenario())
