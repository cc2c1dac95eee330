"""Sampling: distribution, cuts, and draws that depend on nothing but seed and output index."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import numpy
import pytest

from bus.wire.messages import Params
from nodes.own.engines.sampling import draw, logprobs, sample

PROBABILITIES = [0.4, 0.05, 0.3, 0.15, 0.1]
LOGITS = numpy.log(numpy.array([PROBABILITIES], numpy.float32)) + numpy.float32(7.0)
DRAWS = 4000


def frequencies(params: Params) -> dict[int, float]:
    logits = LOGITS.repeat(DRAWS, axis=0)
    counts = Counter(sample(logits, [(params, index) for index in range(DRAWS)]))
    return {token: count / DRAWS for token, count in counts.items()}


def test_greedy_takes_the_largest_whatever_the_seed():
    assert sample(LOGITS, [(Params(seed=9), 3)]) == [0]
    assert sample(numpy.empty((0, 5), numpy.float32), []) == []


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (Params(temperature=1.0, seed=1), {0: 0.4, 1: 0.05, 2: 0.3, 3: 0.15, 4: 0.1}),
        (Params(temperature=1.0, seed=2, top_k=2), {0: 4 / 7, 2: 3 / 7}),
        (Params(temperature=1.0, seed=3, top_k=99), {0: 0.4, 1: 0.05, 2: 0.3, 3: 0.15, 4: 0.1}),
        (Params(temperature=1.0, seed=4, top_p=0.75), {0: 0.4 / 0.85, 2: 0.3 / 0.85, 3: 0.15 / 0.85}),
        (Params(temperature=1.0, seed=5, top_p=0.01), {0: 1.0}),
        (Params(temperature=1.0, seed=6, top_k=2, top_p=0.5), {0: 1.0}),
        (Params(temperature=1.0, seed=7, top_k=1), {0: 1.0}),
        (Params(temperature=1e-3, seed=8), {0: 1.0}),
    ],
)
def test_frequencies_follow_the_distribution(params: Params, wanted: dict[int, float]):
    seen = frequencies(params)
    assert set(seen) == set(wanted)
    for token, probability in wanted.items():
        assert abs(seen[token] - probability) < 4 * math.sqrt(0.25 / DRAWS)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-6])
def test_a_temperature_near_nothing_is_greedy(temperature: float) -> None:
    assert frequencies(Params(temperature=temperature, seed=1)) == {0: 1.0}
    assert sample(LOGITS[:, ::-1], [(Params(temperature=temperature), 0)]) == [4]


def test_temperature_flattens():
    flat = frequencies(Params(temperature=2.0, seed=1))
    weights = [math.sqrt(probability) for probability in PROBABILITIES]
    for token, weight in enumerate(weights):
        assert abs(flat[token] - weight / sum(weights)) < 4 * math.sqrt(0.25 / DRAWS)


def test_a_row_does_not_depend_on_its_neighbours():
    logits = numpy.random.default_rng(1).standard_normal((6, 100)).astype(numpy.float32)
    params = [Params(temperature=1.0, seed=seed) for seed in range(6)]
    together = sample(logits, [(p, 4) for p in params])
    assert together == [sample(logits[i : i + 1], [(p, 4)])[0] for i, p in enumerate(params)]


def test_draws_are_equal_in_another_process_and_spread():
    code = "from nodes.own.engines.sampling import draw; print([draw(11, i) for i in range(20)])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    draws = [draw(11, index) for index in range(20)]
    assert other.strip() == str(draws)
    assert len(set(draws)) == 20
    assert all(0 <= u < 1 for u in draws)
    assert draw(12, 0) != draw(11, 0)
    draw(2**63 - 1, 2**31)


def test_log_probabilities_are_the_models_own():
    """Of the token that was drawn, likely or not, and of the likeliest, the first first; no more than there are."""
    found = logprobs(LOGITS[0], 3, 2)
    assert math.exp(found.logprob) == pytest.approx(0.15)
    assert [(token, round(math.exp(value), 6)) for token, value in found.top] == [(0, 0.4), (2, 0.3)]
    assert logprobs(LOGITS[0], 3, 0).top == ()
    assert [token for token, _ in logprobs(LOGITS[0], 0, 20).top] == [0, 2, 3, 4, 1]
