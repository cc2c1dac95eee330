"""What an edge knows of the cluster behind it, from the controller's last status. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from bus.wire.messages import Legs, RankStatus, Role, Status
from pdbus.client.options import block_tokens_for, leg_for
from pdbus.edge.errors import HttpError

LOST_S = 5.0  # without an answer for so long the controller counts as gone


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model, and what a request for it must know."""

    name: str
    leg: Legs  # of its requests
    block_tokens: int  # to hash prompts with; 0: nobody looks at hashes
    max_context: int  # prompt and output of the longest request that some rank takes
    missing: str  # the role of which no rank is ready; empty: it can serve


class View:
    """`seen` is the last status, of the moment `at`; None before the first."""

    def __init__(self, seen: Status | None = None, at: float = 0.0) -> None:
        self.seen = seen
        self.at = at
        self.models: dict[str, ServedModel] = {}
        ranks: dict[str, list[RankStatus]] = {}
        for rank in seen.ranks if seen is not None else ():
            if rank.state != "gone":
                ranks.setdefault(rank.model, []).append(rank)
        for name, its in sorted(ranks.items()):
            assert seen is not None
            self.models[name] = _served(name, replace(seen, ranks=tuple(its)))

    def followed_by(self, seen: Status, now: float) -> View:
        """What is known with the next status. A controller that was just started again does not know all ranks yet, and
        its clients wait for them: what the former one knew stays until it does, or is no longer new."""
        fresh = View(seen, now)
        restarted = self.seen is not None and self.seen.epoch != seen.epoch and seen.uptime_s < LOST_S
        return View(self.seen, now) if restarted and fresh.unready(now) and not self.unready(self.at) else fresh

    def model(self, name: str) -> ServedModel:
        """The one that a request names, or the only one. HttpError 404 when it is not served, 503 while nothing is."""
        found = self.models.get(name)
        if found is not None:
            return found
        if not self.models:
            raise HttpError(503, self.unready(self.at) or "no rank has joined yet", code="no_rank")
        names = ", ".join(self.models)
        if name:
            raise HttpError(
                404, f"the model {name[:128]!r} is not served; there is {names}", code="model_not_found", param="model"
            )
        if len(self.models) > 1:
            raise HttpError(400, f"several models are served: name one of {names}", param="model")
        return next(iter(self.models.values()))

    def unready(self, now: float) -> str:
        """Why nothing can be served now; empty: something can."""
        if self.seen is None:
            return "no controller has answered yet"
        if now - self.at > LOST_S:
            return f"the controller has not answered for {now - self.at:.0f} s"
        if not self.models:
            return "no rank has joined"
        missing = {model.missing for model in self.models.values()}
        return "" if "" in missing else f"no {min(missing)} rank is ready"


def _served(name: str, status: Status) -> ServedModel:
    leg: Legs = leg_for(status) or "pair"
    ready = {rank.role for rank in status.ranks if rank.state == "ready"}
    roles: tuple[Role, ...] = ("prefill", "decode") if leg == "pair" else ("unified",)
    missing = next((role for role in roles if role not in ready), "")
    decoding = [rank for rank in status.ranks if rank.role == roles[-1]]
    capacities = ((rank.load.kv_capacity if rank.load else 0) or rank.max_context for rank in decoding)  # 0: untold
    context = max(
        (min(rank.max_context, capacity) for rank, capacity in zip(decoding, capacities, strict=True)), default=0
    )
    return ServedModel(name, leg, block_tokens_for(status), context, missing)
