"""What a rank of our own records of itself while it is asked, and that it records nothing otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from legs_world import PROMPT, Rank, World, start

from bus.wire.codec import encode
from bus.wire.messages import (
    MAX_STEPS_PER_MESSAGE,
    MAX_WORK_PER_MESSAGE,
    Location,
    RankStep,
    RankWork,
    RecordQuery,
    RecordReply,
)
from nodes.link import recorder
from nodes.link.recorder import Recorder

WALL_S = 1_000_000.0


def ask(rank: Rank, lease_s: float = 5.0, steps_from: int = 0, work_from: int = 0) -> RecordReply:
    query = RecordQuery(3, rank.name, 0, lease_s, steps_from, work_from)
    reply = rank.core.recorder.asked(query, rank.world.now, WALL_S)
    assert reply.id == 3
    return reply


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(world: World) -> tuple[Rank, Rank]:
    return Rank(world, "prefill", "p", reads_back=True), Rank(world, "decode", "d", decode_cache=True, reads_back=True)


def test_steps_chunks_and_the_fetch_of_a_pair(world: World, pair: tuple[Rank, Rank]) -> None:
    assert [ask(rank) for rank in pair] == [RecordReply(3), RecordReply(3)], "it begins with the question"
    began_us = round((WALL_S + world.now) * 1e6)
    start(pair, "r", max_tokens=6)
    world.run(1.0)
    prefill, decode = map(ask, pair)
    chunk = 8  # tokens of a step
    parts = [(at, min(chunk, len(PROMPT) - at)) for at in range(0, len(PROMPT), chunk)]
    assert {(work.what, work.rid, work.attempt, work.prompt_tokens) for work in prefill.work} == {
        ("chunk", "r", 1, len(PROMPT))
    }
    assert [(work.before, work.tokens) for work in prefill.work] == parts
    assert [(step.number, step.decode_rows, step.prompt_tokens) for step in prefill.steps] == [
        (at + 1, 0, tokens) for at, (_, tokens) in enumerate(parts)
    ]
    for step, work in zip(prefill.steps, prefill.work, strict=True):
        assert (step.began_us, step.duration_us) == (work.began_us, work.duration_us)
        assert step.kv_tokens == work.before
    ends = [step.began_us + step.duration_us for step in prefill.steps]
    assert all(before <= step.began_us for before, step in zip([began_us, *ends], prefill.steps, strict=False))
    (fetch,) = decode.work
    assert (fetch.what, fetch.rid, fetch.tokens, fetch.instance, fetch.dp_rank) == ("fetch", "r", len(PROMPT), "p", 0)
    assert ends[-1] <= fetch.began_us <= fetch.began_us + fetch.duration_us <= decode.steps[0].began_us
    assert [(step.decode_rows, step.prompt_tokens, step.kv_tokens) for step in decode.steps] == [
        (1, 0, len(PROMPT) + at) for at in range(5)
    ]


def test_what_a_prefill_rank_reads_back_has_a_beginning_at_the_decode_rank(
    world: World, pair: tuple[Rank, Rank]
) -> None:
    start(pair, "one", max_tokens=8)
    world.run(1.0)
    for rank in pair:
        ask(rank)
    start(pair, "two", [*PROMPT, *pair[1].tokens["one"], *range(100, 106)], bootstrap_room=6, read_tokens=16)
    world.run(1.0)
    prefill, decode = map(ask, pair)
    (read,) = (work for work in prefill.work if work.what == "read")
    (lend,) = (work for work in decode.work if work.what == "lend")
    assert (read.rid, read.tokens, read.instance) == ("two", 8, "d")
    assert (lend.rid, lend.tokens, lend.instance, lend.duration_us) == ("two", 16, "", 0)
    assert lend.began_us <= read.began_us


def test_of_an_engine_that_does_not_say_its_steps_prompts_and_transfers_are_known(
    world: World, pair: tuple[Rank, Rank]
) -> None:
    for rank in pair:
        rank.runner.record_steps(Recorder())  # it says them to another
        rank.core.recorder.has_steps = False
        assert ask(rank).no_steps
    came_us = round((WALL_S + world.now) * 1e6)
    start(pair, "r", max_tokens=6)
    world.run(1.0)
    prefill, decode = map(ask, pair)
    assert (prefill.steps, decode.steps) == ((), ())
    (prompt,), (fetch,) = prefill.work, decode.work
    assert (prompt.what, prompt.rid, prompt.began_us, prompt.tokens) == ("prompt", "r", came_us, len(PROMPT))
    assert (fetch.what, fetch.rid, fetch.instance, fetch.tokens) == ("fetch", "r", "p", len(PROMPT))
    assert came_us < prompt.began_us + prompt.duration_us <= fetch.began_us


def test_nothing_is_recorded_before_a_question_and_after_its_lease(world: World, pair: tuple[Rank, Rank]) -> None:
    start(pair, "r", max_tokens=4)
    world.run(1.0)
    for rank in pair:
        assert ask(rank, 2.0) == RecordReply(3)
    start(pair, "s", [*PROMPT, 9], max_tokens=4, bootstrap_room=6)
    world.run(1.0)
    assert all(ask(rank, 0.0).steps for rank in pair), "a question without a lease is answered"
    world.run(1.5)
    assert not any(rank.core.recorder.on for rank in pair), "and does not extend the recording"
    start(pair, "t", [*PROMPT, 8], max_tokens=4, bootstrap_room=7)
    world.run(1.0)
    for rank in pair:
        reply = ask(rank, 0.0)
        assert (reply.steps, reply.work) == ((), ())


def test_the_longer_lease_of_two_readers_counts_and_both_get_all(world: World, pair: tuple[Rank, Rank]) -> None:
    ask(pair[0], 5.0)
    ask(pair[0], 1.0)
    world.run(3.0)
    start(pair, "r")
    world.run(1.0)
    first, again = ask(pair[0], 1.0), ask(pair[0], 1.0)
    assert first == again
    assert first.steps
    rest = ask(pair[0], 1.0, steps_from=first.steps[-1].number, work_from=len(first.work) - 1)
    assert (rest.steps, rest.work) == (first.steps[-1:], first.work[-1:])
    assert rest.work_first == len(first.work) - 1
    nothing = ask(pair[0], 1.0, steps_from=10**6, work_from=10**6)
    assert (nothing.steps, nothing.work, nothing.work_first) == ((), (), len(first.work))


def test_numbers_of_work_go_on_in_the_next_recording(world: World, pair: tuple[Rank, Rank]) -> None:
    ask(pair[0], 1.0)
    start(pair, "r")
    world.run(0.9)
    had = ask(pair[0], 0.0)
    world.run(3.0)
    ask(pair[0], 2.0)
    start(pair, "s", [*PROMPT, 9], bootstrap_room=6)
    world.run(1.0)
    later = ask(pair[0], 0.0, had.steps[-1].number + 1, len(had.work))
    assert later.work_first == len(had.work)
    assert {work.rid for work in later.work} == {"s"}
    assert later.steps[0].number == had.steps[-1].number + 1


def filled(steps: int, works: int) -> Recorder:
    found = Recorder()
    found.asked(RecordQuery(1, "d", 0, 9.0), 0.0, 0.0)
    for number in range(1, steps + 1):
        found.steps.append((number, number / 100, 0.01, 32, 0, 5))
    for number in range(works):
        leg: Any = type("Leg", (), {"rid": str(number), "attempt": 1, "kv_attempt": 2, "prompt_tokens": 9,
                                    "location": Location("p", 3, 1, "")})()  # fmt: skip
        found.fetched(leg, number / 100 + 0.001, 0.001, 7)
    return found


def test_rings_are_bounded_and_a_reader_sees_what_it_has_missed() -> None:
    found = filled(recorder.MAX_STEPS + 10, recorder.MAX_WORK + 10)
    steps, work = [], []
    steps_from = work_from = 0
    answers, more = 0, True
    while more:
        answers += 1
        reply = found.asked(RecordQuery(1, "d", 0, 9.0, steps_from, work_from), 1.0, 0.0)
        assert len(reply.steps) <= MAX_STEPS_PER_MESSAGE
        assert len(reply.work) <= MAX_WORK_PER_MESSAGE
        assert reply.work_first == (work_from or 10)
        steps += reply.steps
        work += reply.work
        steps_from = steps[-1].number + 1
        work_from = reply.work_first + len(reply.work)
        more = reply.more
    assert answers == recorder.MAX_WORK // MAX_WORK_PER_MESSAGE
    assert [step.number for step in steps] == [*range(11, recorder.MAX_STEPS + 11)]
    assert [each.rid for each in work] == [str(number) for number in range(10, recorder.MAX_WORK + 10)]
    assert steps[0] == RankStep(11, 110_000, 10_000, 32, 0, 5)
    assert work[0] == RankWork("fetch", "10", 2, 100_000, 1_000, 7, 0, 9, "p", 3)


def test_an_answer_fits_in_a_frame() -> None:
    most = 2**63 - 1
    step = RankStep(*(most,) * 6)
    work = RankWork("\U0001f600" * 32, "\U0001f600" * 128, 10**6, *(most,) * 5, "\U0001f600" * 64, 4095)
    reply = RecordReply(most, (step,) * MAX_STEPS_PER_MESSAGE, (work,) * MAX_WORK_PER_MESSAGE, most, True, True, True,
                        most, -most, most, most, True)  # fmt: skip
    encode(reply)  # an error where it is too large
