"""Controller, lab and the SGLang plugin decide alike: one trace of submits, reports and ends goes through all three."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol

import pytest

from bus.wire.hashing import packed_hashes, token_bytes
from bus.wire.messages import Ack, Dispatch, Ended, Hello, Load, LoadReport, Progress, Role, Submit
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import FromClient, FromNode, Published, Tick, ToNode
from controller.policies import POLICIES, PolicySettings, make_policy
from pdbus.lab.choosers import TableChooser
from pdbus.lab.config import LabConfig
from pdbus.sglang.chooser import Chooser

RANKS, BLOCK, EPOCH, NAME = 4, 16, 1, "unified"  # the lab's names of an instance and of a start
STEPS = 80


class Side(Protocol):
    """One of the three: a controller of its own kind over the same ranks."""

    def pick(self, rid: str, tokens: list[int], room: int, now: float) -> tuple[int, int]:
        """The dp_rank, and the tokens that were charged."""

    def report(self, dp_rank: int, load: Load, now: float) -> None: ...
    def ended(self, dp_rank: int, rid: str, now: float) -> None: ...


def header(rid: str, tokens: list[int], room: int, leg: Role) -> Submit:
    hashes = packed_hashes(token_bytes(tokens), BLOCK)
    return Submit(rid, leg, len(tokens), 8, bootstrap_room=room, block_tokens=BLOCK, block_hashes=hashes)


class OfController:
    def __init__(self, method: str, role: Role) -> None:
        config = ControllerConfig(settle_s=0.0, **{f"{role}_method": method})
        self.core = ControllerCore(config, EPOCH, 0.0)
        self.role = role
        for dp_rank in range(RANKS):
            hello = Hello(
                instance=NAME, dp_rank=dp_rank, epoch=EPOCH, role=role, model="m", dp_size=RANKS, state="ready",
                endpoint="ipc:///x", max_context=0, kv_capacity=0, max_running=0, block_tokens=BLOCK,
            )  # fmt: skip
            self.core.handle(FromNode(dp_rank, hello), 0.0)

    def pick(self, rid: str, tokens: list[int], room: int, now: float) -> tuple[int, int]:
        self.core.handle(Tick(), now)
        payload = (token_bytes(tokens), b"params")
        out = self.core.handle(FromClient(b"client", header(rid, tokens, room, self.role), payload), now)
        (sent,) = [action.message for action in out if isinstance(action, ToNode)]
        assert isinstance(sent, Dispatch)
        return sent.dp_rank, sent.charge

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        self.core.handle(Published(LoadReport(NAME, dp_rank, EPOCH, load.seq, load)), now)

    def ended(self, dp_rank: int, rid: str, now: float) -> None:
        ended = (Ended(rid, 1, self.role, "ok", "", 8),)
        self.core.handle(FromNode(dp_rank, Progress(NAME, dp_rank, EPOCH, (), ended)), now)


class OfLab:
    def __init__(self, method: str, role: Role) -> None:
        settings = PolicySettings(role, seed=EPOCH)
        self.chooser = TableChooser(make_policy(method, settings), role, RANKS, EPOCH - 1, LabConfig(), BLOCK)
        self.role = role

    def pick(self, rid: str, tokens: list[int], room: int, now: float) -> tuple[int, int]:
        return self.chooser.pick(header(rid, tokens, room, self.role), now)

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        self.chooser.report(dp_rank, load, now)

    def ended(self, dp_rank: int, rid: str, now: float) -> None:
        self.chooser.ended(dp_rank, Ended(rid, 1, self.role, "ok", "", 8), now)


class OfSglang:
    def __init__(self, method: str, role: Role) -> None:
        self.chooser = Chooser(
            make_policy(method, PolicySettings(role, seed=EPOCH)), instance=NAME, role=role, dp_size=RANKS,
            nonce=EPOCH, now=0.0, block_tokens=BLOCK,
        )  # fmt: skip

    def pick(self, rid: str, tokens: list[int], room: int, now: float) -> tuple[int, int]:
        before = [rank.sent_tokens for rank in self.chooser.ranks]
        request = SimpleNamespace(rid=rid, input_ids=tokens, bootstrap_room=room, routed_dp_rank=None)
        dp_rank = self.chooser.pick(request, range(RANKS), now)
        assert dp_rank is not None
        return dp_rank, self.chooser.ranks[dp_rank].sent_tokens - before[dp_rank]

    def report(self, dp_rank: int, load: Load, now: float) -> None:
        self.chooser.on_message(LoadReport(NAME, dp_rank, EPOCH, load.seq, load), now)

    def ended(self, dp_rank: int, rid: str, now: float) -> None:
        """It learns of none."""


@dataclass
class Rank:
    """What has come to one rank, in order, what it has taken in of that, and what it said."""

    sent: list[tuple[str, int]] = field(default_factory=list)
    taken: int = 0
    ended: int = 0
    seq: int = 0

    def load(self) -> Load:
        self.seq += 1
        live = self.sent[self.ended : self.taken]
        return Load(
            seq=self.seq, step=self.seq, running=len(live), waiting=0, waiting_tokens=sum(charge for _, charge in live),
            kv_tokens=0, kv_capacity=0, max_running=0,
            acks=(Ack(EPOCH, self.taken, sum(charge for _, charge in self.sent[: self.taken])),),
        )  # fmt: skip


def decisions(side: Side, seed: int = 5) -> Iterator[int]:
    """The rank of each request. Reports are late, and miss what is on its way."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1000) for _ in range(BLOCK * rng.randrange(2, 12))] for _ in range(6)]
    ranks = [Rank() for _ in range(RANKS)]
    for step in range(STEPS):
        now = 0.05 * step
        tokens = rng.choice(stems) + [rng.randrange(1000) for _ in range(rng.randrange(1, 80))]
        dp_rank, charge = side.pick(f"r{step}", tokens, rng.getrandbits(62), now)
        ranks[dp_rank].sent.append((f"r{step}", charge))
        yield dp_rank
        for number, rank in enumerate(ranks):
            if rng.random() < 0.3:
                rank.taken = max(rank.taken, len(rank.sent) - rng.randrange(3))
            while rank.ended < rank.taken and rng.random() < (0.5, 0.4, 0.3, 0.2)[number]:
                side.ended(number, rank.sent[rank.ended][0], now)
                rank.ended += 1
            if rng.random() < 0.4:
                side.report(number, rank.load(), now)


SIDES = {"controller": OfController, "lab": OfLab, "sglang": OfSglang}
CHOSEN = {
    "round_robin": "01230123012301230123012301230123012301230123012301230123012301230123012301230123",
    "follow_bootstrap_room": "10031333323313002232132121022000213121133320110313213031332102321213023220332222",
    "total_requests": "01230123102331203020201320010302301222301230012011230131013022102132201321311312",
    "total_tokens": "01232031120332103020020321030200301122232223000302132022202011330010322121131220",
    "cache_aware": "01231201312321313100102132231110030201002013030100110132103002031201031112013001",
    "least_cost": "01231201312321313100102132231110030201002013030100110132103002031201031112013001",
}


CASES = [(side, role, method) for side in SIDES for role in ("unified", "prefill") for method in POLICIES]


@pytest.mark.parametrize(("side", "role", "method"), CASES)
def test_one_trace_goes_to_the_same_ranks_everywhere(side: str, role: Role, method: str) -> None:
    name = f"{method} at {role}" if f"{method} at {role}" in CHOSEN else method
    assert "".join(map(str, decisions(SIDES[side](method, role)))) == CHOSEN[name]
