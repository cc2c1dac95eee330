"""The torch and numpy engines on the tiny model: against a naive model, split, under damage, with failing steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from queue import Queue
from typing import Any

import pytest

from bus.errors import ConfigError
from bus.runtime.loop import Loop
from bus.wire.messages import Params
from nodes.own.engines.base import Row, StepPlan, StepResult
from nodes.own.engines.factory import EngineConfig, build_engine, load_llama
from nodes.own.engines.faults import Faults
from nodes.own.engines.llama_config import LlamaConfig
from nodes.own.engines.numpy_llama import NumpyLlama
from nodes.own.engines.reference import generate_alone

torch = pytest.importorskip("torch")  # what numpy is compared with
Llama = pytest.importorskip("nodes.own.engines.llama").Llama
tiny = pytest.importorskip("nodes.own.engines.tiny")
TINY, load_tiny = tiny.TINY, tiny.load_tiny

GREEDY = Params(ignore_eos=True)
SAMPLED = Params(temperature=1.2, top_k=50, top_p=0.95, seed=43, ignore_eos=True)
BLOCK_TOKENS = 8
OUTPUT_TOKENS = 14


@pytest.fixture(scope="module", params=["torch", "numpy"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Calls:
    """Stands for a loop: holds what other threads ask it to run until the test runs it."""

    def __init__(self) -> None:
        self.calls: Queue[Callable[[], None]] = Queue()

    def call_threadsafe(self, function: Callable[[], None]) -> None:
        self.calls.put(function)


class Bench:
    """An engine driven step by step."""

    def __init__(self, kind: str, **options: object) -> None:
        self.loop = Calls()
        settings = {"blocks": 96, "block_tokens": BLOCK_TOKENS, **options}
        model, engine = load_llama(kind, "tiny")
        self.engine = engine(self.loop, model, **settings)
        self.number = 0

    def step(self, rows: Iterable[Row]) -> StepResult:
        self.number += 1
        results: list[StepResult] = []
        self.engine.submit(StepPlan(self.number, tuple(rows)), results.append)
        self.loop.calls.get(timeout=120)()
        assert [result.number for result in results] == [self.number]
        return results[0]

    def tokens(self, rows: Iterable[Row]) -> dict[int, int]:
        result = self.step(rows)
        assert result.error == ""
        return dict(result.tokens)


@pytest.fixture
def bench(kind: str) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        made.append(Bench(kind, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def prompts_of(lengths: Iterable[int], seed: int = 3) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        seq: torch.randint(3, TINY.vocab_size, (length,), generator=generator).tolist()
        for seq, length in enumerate(lengths)
    }


@cache
def answer_alone(kind: str, prompt: tuple[int, ...], params: Params) -> list[int]:
    """The answer to compare with, computed once for all ways to split a run."""
    return generate_alone("tiny", prompt, OUTPUT_TOKENS, params, engine=kind)


def alone(kind: str, prompts: dict[int, list[int]], params: Params) -> dict[int, list[int]]:
    return {seq: answer_alone(kind, tuple(prompt), params) for seq, prompt in prompts.items()}


def table_of(seq: int) -> list[int]:
    """Ten blocks, scattered and in no order."""
    return [(seq + 7 * index) % 12 + 12 * (index % 8) for index in range(8)]


def prefill(bench: Bench, prompts: dict[int, list[int]], params: Params, chunk: int) -> dict[int, int]:
    """All prompts side by side, `chunk` tokens of each a step; the first tokens."""
    first: dict[int, int] = {}
    for start in range(0, max(map(len, prompts.values())), chunk):
        rows = []
        for seq, prompt in prompts.items():
            if tokens := prompt[start : start + chunk]:
                last = start + chunk >= len(prompt)
                rows.append(Row(seq, tokens, start, table_of(seq), params if last else None))
        first |= bench.tokens(rows)
    return first


def move(source: Bench, target: Bench, prompts: dict[int, list[int]], damage: Callable[[bytearray], None]) -> None:
    for seq, prompt in prompts.items():
        for index, block in enumerate(table_of(seq)[: math.ceil(len(prompt) / BLOCK_TOKENS)]):
            data = bytearray(source.engine.export_block(block))
            if index == 1 or len(prompt) <= BLOCK_TOKENS:
                damage(data)
            target.engine.import_block(block, bytes(data))


def decode(
    bench: Bench, prompts: dict[int, list[int]], first: dict[int, int], params: Params, n: int = OUTPUT_TOKENS
) -> dict[int, list[int]]:
    """Rows join one a step, so that every step has another composition; a foreign prompt chunk rides along."""
    outputs = {seq: [token] for seq, token in first.items()}
    waiting = list(outputs)
    joined: list[int] = []
    step = 0
    while any(len(output) < n for output in outputs.values()):
        if waiting:
            joined.append(waiting.pop(0))
        rows = [
            Row(s, outputs[s][-1:], len(prompts[s]) + len(outputs[s]) - 1, table_of(s), params, len(outputs[s]))
            for s in joined
            if len(outputs[s]) < n
        ]
        rows.insert(len(rows) // 2, Row(99, [7 + step] * 5, 5 * (step % 3), table_of(11), None))
        for seq, token in bench.tokens(rows).items():
            outputs[seq].append(token)
        step += 1
    return outputs


def whole(data: bytearray) -> None:
    """No damage."""


def zero_a_layer(data: bytearray) -> None:
    size = len(data) // TINY.layers
    data[2 * size : 3 * size] = bytes(size)


def lose_the_block(data: bytearray) -> None:
    data[:] = bytes(len(data))


def swap_k_and_v(data: bytearray) -> None:
    size = len(data) // TINY.layers
    for start in range(0, len(data), size):
        half = start + size // 2
        data[start:half], data[half : start + size] = data[half : start + size], data[start:half]


LENGTHS = (1, 5, 8, 9, 23, 40, 17)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [1000, 8, 5])
def test_split_run_equals_single_process_run(bench: Callable[..., Bench], kind: str, chunk: int, params: Params):
    prompts = prompts_of(LENGTHS)
    source, target = bench(), bench()
    first = prefill(source, prompts, params, chunk)
    move(source, target, prompts, whole)
    outputs = decode(target, prompts, first, params)
    assert outputs == alone(kind, prompts, params)
    if params is GREEDY:
        assert outputs == alone("torch", prompts, params)
    assert all(len(set(output)) > OUTPUT_TOKENS // 3 for output in outputs.values()), "an echo would prove nothing"


@pytest.mark.parametrize("damage", [zero_a_layer, lose_the_block, swap_k_and_v])
def test_damaged_kv_shows_in_the_output(bench: Callable[..., Bench], damage: Callable[[bytearray], None]):
    prompts = prompts_of((23, 40, 17))
    source, target = bench(), bench()
    first = prefill(source, prompts, GREEDY, 1000)
    move(source, target, prompts, damage)
    outputs = decode(target, prompts, first, GREEDY)
    for seq, whole_answer in alone("torch", prompts, GREEDY).items():
        assert outputs[seq] != whole_answer


def naive_logits(config: LlamaConfig, weights: dict[str, Any], ids: list[int]) -> Any:
    """A dense Llama in float64, written from the papers: one sequence, no cache, loops over heads and positions."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    d, kv = config.head_dim, config.kv_heads * config.head_dim

    def norm(x: Any, weight: Any) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weight

    def rotate(x: Any, position: int) -> Any:
        turned = x.clone()
        for i in range(0, d, 2):
            angle = position / config.rope_theta ** (i / d)
            turned[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
            turned[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
        return turned

    x = w["embed"][ids]
    for layer in range(config.layers):
        h = norm(x, w[f"{layer}.attn_norm"])
        q, k, v = (h @ w[f"{layer}.qkv"].T).split([config.width, kv, kv], dim=1)
        attended = torch.zeros_like(q)
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            mine, theirs = slice(head * d, head * d + d), slice(shared * d, shared * d + d)
            keys = torch.stack([rotate(k[position, theirs], position) for position in range(len(ids))])
            for position in range(len(ids)):
                scores = keys[: position + 1] @ rotate(q[position, mine], position) / math.sqrt(d)
                attended[position, mine] = torch.softmax(scores, 0) @ v[: position + 1, theirs]
        x = x + attended @ w[f"{layer}.attn_out"].T
        gate, up = (norm(x, w[f"{layer}.ffn_norm"]) @ w[f"{layer}.gate_up"].T).chunk(2, dim=1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{layer}.down"].T
    return norm(x, w["out_norm"]) @ w["embed"].T


def test_forward_agrees_with_a_naive_dense_model(kind: str):
    config = LlamaConfig("small", 3, 48, 6, 2, 80, 64, 64, 1000.0, 1e-5, (2,))
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in config.shapes().items()}
    held = {name: tensor.numpy() for name, tensor in weights.items()}
    llama = Llama(config, weights) if kind == "torch" else NumpyLlama(config, held)
    a, b = ([int(i) for i in torch.randint(0, 64, (n,), generator=generator)] for n in (21, 13))
    wanted_a, wanted_b = naive_logits(config, weights, a), naive_logits(config, weights, b)
    pool = llama.new_pool(20, 4)
    pool += 100.0  # what former owners left must not matter
    ta, tb = [9, 2, 13, 5, 0, 17], [4, 1, 3, 19]
    steps = [
        [Row(1, a[:9], 0, ta, GREEDY), Row(2, b[:1], 0, tb, GREEDY)],
        [Row(2, b[1:6], 1, tb, GREEDY), Row(1, a[9:10], 9, ta, GREEDY)],
        [Row(1, a[10:11], 10, ta, GREEDY), Row(2, b[6:7], 6, tb, GREEDY)],
        [Row(1, a[11:20], 11, ta, None), Row(2, b[7:8], 7, tb, GREEDY)],
        [Row(1, a[20:], 20, ta, GREEDY), Row(2, b[8:], 8, tb, GREEDY)],
    ]
    for rows in steps:
        logits = iter(llama.forward(pool, rows))
        for row in rows:
            if row.params is not None:
                wanted = (wanted_a if row.seq == 1 else wanted_b)[row.start + len(row.tokens) - 1]
                assert (torch.as_tensor(next(logits)) - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_a_failing_step_is_an_error_and_the_next_one_works(bench: Callable[..., Bench]):
    one = bench()
    for bad in (
        Row(1, [TINY.vocab_size], 0, [0], GREEDY),
        Row(1, [5] * 9, 0, [0], GREEDY),
        Row(1, [5], 0, [96], GREEDY),
    ):
        result = one.step([bad])
        assert result.error
        assert "\n" not in result.error
        assert result.tokens == ()
    assert one.tokens([Row(1, [5, 6], 0, [0], GREEDY)]) == {1: generate_alone("tiny", [5, 6], 1, GREEDY)[0]}


def test_nothing_of_a_former_owner_is_exported(bench: Callable[..., Bench]):
    one = bench()
    one.tokens([Row(1, [5] * BLOCK_TOKENS, 0, [3], GREEDY)])
    one.tokens([Row(2, [6], 0, [3], GREEDY)])
    used = bytes(one.engine.export_block(3))
    one.tokens([Row(3, [6], 0, [4], GREEDY)])
    assert used == bytes(one.engine.export_block(4))


def test_not_a_number_in_one_sequence_stays_there(bench: Callable[..., Bench]):
    """It gets no token, which would read as an answer; the one beside it goes on as if alone."""
    prompts = prompts_of((26, 17))  # one is longer, so that the other is padded when they decode together
    one = bench()
    first = prefill(one, prompts, GREEDY, 1000)
    assert table_of(0)[0] == 0, "the block that careless padding would read"
    nan = b"\xff" * one.engine.spec.block_bytes
    for block in table_of(0)[:4]:
        one.engine.import_block(block, nan)
    whole = generate_alone("tiny", prompts[1], OUTPUT_TOKENS, GREEDY)
    for params in (GREEDY, Params(temperature=0.8, seed=3, logprobs=2)):
        damaged = Row(0, [first[0]], len(prompts[0]), table_of(0), params)
        result = one.step([damaged, Row(1, [whole[0]], len(prompts[1]), table_of(1), GREEDY)])
        assert (result.tokens, result.damaged, result.error, result.logprobs) == (((1, whole[1]),), (0,), "", ())
    assert decode(one, {1: prompts[1]}, {1: whole[0]}, GREEDY)[1] == whole
    assert one.tokens([Row(5, prompts[1], 0, table_of(0), GREEDY)]) == {5: first[1]}


def test_blocks_are_the_pool_itself_and_of_one_size(bench: Callable[..., Bench]):
    one = bench()
    view = one.engine.export_block(5)
    assert view.readonly
    assert view.nbytes == one.engine.spec.block_bytes == BLOCK_TOKENS * 4 * 2 * 2 * 32 * 4
    one.engine.import_block(5, bytes([1]) * view.nbytes)
    assert view[0] == view[-1] == 1, "export copied"
    assert one.engine.export_block(4)[-1] == one.engine.export_block(6)[0] == 0
    with pytest.raises(ValueError, match="bytes, not 3"):
        one.engine.import_block(5, b"abc")
    with pytest.raises(IndexError):
        one.engine.export_block(96)
    with pytest.raises(IndexError):
        one.engine.export_block(-1)


def test_injected_hang_ends_with_close_and_never_answers(bench: Callable[..., Bench]):
    one = bench(faults=Faults(fail_token=0, hang_token=1))
    assert "injected" in one.step([Row(1, [5, 0], 0, [0], GREEDY)]).error
    one.engine.submit(StepPlan(9, (Row(1, [1], 0, [0], GREEDY),)), lambda result: pytest.fail("a hung step answered"))
    one.engine.close()
    one.engine.close()
    assert one.loop.calls.empty()


def test_through_the_factory_on_a_real_loop_off_its_thread(kind: str):
    loop = Loop()
    engine = build_engine(EngineConfig(kind, "tiny", kv_tokens=64), loop)
    results: list[tuple[StepResult, str]] = []

    def done(result: StepResult) -> None:
        results.append((result, threading.current_thread().name))
        loop.stop()

    engine.submit(StepPlan(1, (Row(1, [5, 6, 7], 0, [0], GREEDY),)), done)
    loop.run()
    engine.close()
    loop.close()
    result, thread = results[0]
    assert thread == threading.current_thread().name
    assert result.tokens == ((1, generate_alone("tiny", [5, 6, 7], 1, GREEDY)[0]),)
    assert result.duration_s > 0
    assert (engine.spec.blocks, engine.spec.max_context, engine.spec.vocab_size) == (4, 2048, 512)


def test_two_models_of_one_seed_are_equal_and_do_not_echo():
    again = load_tiny()
    pool = again.new_pool(4, 16)
    prompt = prompts_of((12,))[0]
    logits = again.forward(pool, [Row(0, prompt, 0, range(4), GREEDY)])
    assert int(logits.argmax()) == generate_alone("tiny", prompt, 1, GREEDY)[0]
    parameters = sum(math.prod(shape) for shape in TINY.shapes().values())
    assert 0.9e6 < parameters < 1.1e6
    output = generate_alone("tiny", prompt, 60, GREEDY)
    assert len(set(output)) > 20


def test_reference_stops_at_a_stop_token_and_keeps_it():
    prompt = prompts_of((12,))[0]
    free = generate_alone("tiny", prompt, 10, GREEDY)
    stop = next(token for token in free if token != free[0])
    cut = generate_alone("tiny", prompt, 10, Params(stop_token_ids=(stop,), ignore_eos=True))
    assert cut == free[: free.index(stop) + 1]


def test_settings_that_do_not_fit_are_refused_in_one_line():
    loop = Loop()
    cases = [
        ({"engine": "gpu"}, "unknown engine 'gpu'; choose one of torch, numpy, sim"),
        ({"model": "gpt9"}, "no model 'gpt9'; choose one of smollm2, tiny"),
        ({"model": "tiny", "max_context": 4096}, "4096 is more than the 2048"),
        ({"block_tokens": 0}, "--block-tokens"),
        ({"kv_tokens": 8}, "not even one block"),
        ({"kv_tokens": -1}, "must not be negative"),
        ({"engine": "sim", "vocab_size": 3}, "more than its 3 special tokens"),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError) as caught:
            build_engine(EngineConfig(**settings), loop)  # type: ignore[arg-type]
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    loop.close()
