"""A rank's load between its scheduler's reports, against a model that counts each leg once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from link_world import Engine

from nodes.link import Cancel, Start
from nodes.link.leg import Leg


class LoadMachine(RuleBasedStateMachine):
    """The link's side and the scheduler's move apart: orders wait for `poll`, words for `take`. What a report leaves
    out, since its scheduler counts computed parts of prompts, stays left out until the next."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(queue_max=10_000)
        self.live: dict[str, int] = {}  # at the link: rid -> prompt tokens
        self.begun: set[str] = set()  # of these, as far as the link has heard
        self.known: dict[str, tuple[Leg, bool]] = {}  # at the scheduler: (leg, whether it runs)
        self.said: list[tuple[str, str]] = []  # on its way to the link

    @rule(length=st.integers(1, 40))
    def dispatch(self, length: int) -> None:
        self.live[self.engine.dispatch([7] * length)] = length

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.cancel(rid)
        self._over(rid)

    @rule()
    def poll(self) -> None:
        for order in self.engine.link.poll():
            if isinstance(order, Start):
                self.known[order.leg.rid] = order.leg, False
            else:
                assert isinstance(order, Cancel)
                self.known.pop(order.leg.rid, None)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), word=st.sampled_from(("began", "output", "finish", "fail")))
    def say(self, data: st.DataObject, word: str) -> None:
        rid = data.draw(st.sampled_from(sorted(self.known)))
        leg, link = self.known[rid][0], self.engine.link
        if word == "began":
            link.began(leg)
        elif word == "output":
            link.output(leg, [5])
        elif word == "finish":
            link.finish(leg)
        else:
            link.fail(leg, "engine_failed", "so it is")
        if word in ("finish", "fail"):
            del self.known[rid]
        else:
            self.known[rid] = leg, True
        self.said.append((word, rid))

    @rule()
    def report(self) -> None:
        waiting = [leg for leg, runs in self.known.values() if not runs]
        self.engine.link.report(
            running=len(self.known) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=sum(leg.prompt_tokens for leg in waiting),
        )

    @rule()
    def take(self) -> None:
        for word, rid in self.said:
            if word in ("finish", "fail"):
                self._over(rid)
            elif rid in self.live:
                self.begun.add(rid)
        self.said.clear()
        self.engine.take()

    @invariant()
    def each_leg_counts_once(self) -> None:
        waiting = self.live.keys() - self.begun
        assert self.engine.load() == (len(self.begun), len(waiting), sum(self.live[rid] for rid in waiting))

    def _over(self, rid: str) -> None:
        self.live.pop(rid, None)
        self.begun.discard(rid)


TestLoad = LoadMachine.TestCase
TestLoad.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
