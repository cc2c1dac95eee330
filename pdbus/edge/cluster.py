"""The edge's view of its cluster: which models are served, and whether they can be, from the controller's last status.
Pure; times are in seconds of one clock."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from bus.wire.messages import Legs, RankStatus, Role, Status
from pdbus.client.options import block_tokens_for, leg_for
from pdbus.edge.errors import HttpError

LOST_S = 5.0  # a controller silent for this long counts as gone


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served model, with what a request for it needs."""

    name: str
    leg: Legs  # the legs of its requests
    block_tokens: int  # block size for hashes of prompts; 0: no method uses hashes
    max_context: int  # tokens of the longest request (prompt and output) that some rank takes
    missing: str  # the role without a ready rank; empty: the model can be served


class View:
    """The view at the time `at`: `models` are the served ones by name. `seen` is the last status; None before the
    first."""

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
        """Return the view after the next status. A controller that has just restarted does not know all ranks yet, so
        the former status stays until it does, for LOST_S at most."""
        fresh = View(seen, now)
        restarted = self.seen is not None and self.seen.epoch != seen.epoch and seen.uptime_s < LOST_S
        return View(self.seen, now) if restarted and fresh.unready(now) and not self.unready(self.at) else fresh

    def model(self, name: str | None) -> ServedModel:
        """Return the model named `name`; for an empty name, or None, the only one. Raises HttpError: 404 for a model
        that is not served, 400 for no name with several models, 503 while nothing is served."""
        found = self.models.get(name or "")
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
        """Return the reason why no model can be served at the time `now`; empty: one can."""
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
    capacities = ((rank.load.kv_capacity if rank.load else 0) or rank.max_context for rank in decoding)  # 0: unknown
    context = max(
        (min(rank.max_context, capacity) for rank, capacity in zip(decoding, capacities, strict=True)), default=0
    )
    return ServedModel(name, leg, block_tokens_for(status), context, missing)
