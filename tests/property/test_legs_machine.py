"""Pairs of prefill and decode ranks under lost, damaged, delayed and doubled messages, cancels, deaths and re-dispatch.

Whatever happens, each leg ends exactly once, tokens are the reference's, everything sent is acknowledged, and once
all is quiet no memory is held.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from legs_world import VOCAB, Rank, World

from bus.wire.messages import CancelLeg, Ended, KvBlock, KvDone, ReadBack, Tokens
from nodes.own.engines.sim import sim_generate

NAMES = ("p0", "p1", "d0", "d1")


class LegsMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.05, 0.3]), cached=st.integers(0, 2))
    def begin(self, seed: int, loss: float, cached: int) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.world = World()
        for name in NAMES:
            role, caches = ("prefill", False) if name[0] == "p" else ("decode", int(name[1]) < cached)
            reads = caches or role == "prefill"
            Rank(self.world, role, name, blocks=24, decode_cache=caches, reads_back=reads)  # type: ignore[arg-type]
        self.world.tamper = self.tamper
        self.world.jitter = lambda: self.rng.random() * 0.01
        self.world.copies = lambda: 2 if self.rng.random() < 0.1 else 1
        self.sent: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.charged: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.attempts: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.legs: set[tuple[str, str, int]] = set()

    def tamper(self, message: Any, data: bytes) -> bytes | None:
        if isinstance(message, KvDone):
            return data  # the transport loses messages only with a peer; a lost end is `death`'s part
        if self.rng.random() < self.loss:
            return None
        if isinstance(message, KvBlock) and self.rng.random() < self.loss:
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def rank(self, name: str) -> Rank:
        return self.world.ranks[name]

    def dispatch(self, name: str, rid: str, attempt: int, **changes: Any) -> None:
        prompt = self.prompts[rid]
        self.sent[name] += 1
        self.charged[name] += len(prompt)
        self.legs.add((name, rid, attempt))
        self.rank(name).dispatch(
            rid, prompt, attempt=attempt, bootstrap_room=int(rid[1:]), max_tokens=self.max_tokens[rid], **changes
        )

    def run_pair(self, rid: str, prefill: int, decode: int, told: bool) -> None:
        attempt = self.attempts[rid]
        source, target = self.rank(f"p{prefill}"), self.rank(f"d{decode}")
        if not target.dead:
            target.read(rid, attempt, len(target.tokens.get(rid, [])))
            self.dispatch(target.name, rid, attempt, **({"prefill": source.location} if told else {}))
        if not source.dead:
            reads = told and self.rng.random() < 0.7
            read = {"read_back": ReadBack(target.location, 4 * self.rng.randrange(10))} if reads else {}
            self.dispatch(source.name, rid, attempt, **read)

    @rule(
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 8),
        prefill=st.integers(0, 1),
        decode=st.integers(0, 1),
        told=st.booleans(),
        follows=st.booleans(),
    )
    def submit(self, length: int, max_tokens: int, prefill: int, decode: int, told: bool, follows: bool) -> None:
        rid = f"r{len(self.prompts)}"
        before = self.rng.choice([*self.prompts.values()]) if follows and self.prompts else []
        self.prompts[rid] = [*before[:16], *(3 + self.rng.randrange(4) for _ in range(length))]
        self.max_tokens[rid] = max_tokens
        self.attempts[rid] = 1
        self.run_pair(rid, prefill, decode, told)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), prefill=st.integers(0, 1), decode=st.integers(0, 1))
    def redispatch(self, data: st.DataObject, prefill: int, decode: int) -> None:
        rid = data.draw(st.sampled_from(sorted(self.prompts)))
        self.attempts[rid] += 1
        self.run_pair(rid, prefill, decode, True)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), decode=st.integers(0, 1))
    def run_at_decode(self, data: st.DataObject, decode: int) -> None:
        """A decode rank with a cache computes the prompt itself."""
        rid = data.draw(st.sampled_from(sorted(self.prompts)))
        target = self.rank(f"d{decode}")
        if target.runner.facts.prefills and not target.dead:
            self.attempts[rid] += 1
            target.read(rid, self.attempts[rid], len(target.tokens.get(rid, [])))
            self.dispatch(target.name, rid, self.attempts[rid], leg="unified")

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """The same attempt again, new or old: taken once, or fenced; acknowledged either way."""
        name, rid, attempt = data.draw(st.sampled_from(sorted(self.legs)))
        if not self.rank(name).dead:
            self.dispatch(name, rid, attempt)

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name, rid, attempt = data.draw(st.sampled_from(sorted(self.legs)))
        rank = self.rank(name)
        if not rank.dead:
            rank.do(rank.core.cancel(0, CancelLeg(rid, attempt), self.world.now))

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.03, 0.2, 1.5]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(name=st.sampled_from(["p1", "d1"]))
    def death(self, name: str) -> None:
        self.rank(name).dead = True

    @invariant()
    def output_is_a_prefix_of_the_reference(self) -> None:
        for name in ("d0", "d1") if self.begun else ():
            for rid, tokens in self.rank(name).tokens.items():
                assert tokens == sim_generate(self.prompts[rid], self.max_tokens[rid], VOCAB)[: len(tokens)]

    @property
    def begun(self) -> bool:
        return hasattr(self, "legs")

    def teardown(self) -> None:
        if not self.begun:
            return
        self.world.run(100.0, tick_s=0.25)  # longer than any hold, stall or location time
        for rank in self.world.ranks.values():
            if rank.dead:
                continue
            assert rank.idle(), f"{rank.name} still holds something"
            told = [(ack.dispatches, ack.tokens) for ack in rank.core.reports.acks]
            sent = (self.sent[rank.name], self.charged[rank.name])
            assert told == ([sent] if sent[0] else [])
        for name, rid, attempt in self.legs:
            rank = self.rank(name)
            if rank.dead:
                continue
            ends: set[Ended] = set(rank.ended[rid, attempt])
            # an attempt that ended and comes again after a newer one is told `fenced` as well
            assert len({end.code for end in ends} - {"fenced"}) <= 1, ends
            assert ends
            if rank.core.role == "decode" and "ok" in {end.code for end in ends} and self.attempts[rid] == attempt:
                last: Tokens = rank.finishes[rid]
                assert (last.finish, rank.tokens[rid]) == (
                    "length",
                    sim_generate(self.prompts[rid], self.max_tokens[rid], VOCAB),
                )


LegsMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestLegs = LegsMachine.TestCase
