"""The roles of models that should be served here, so that their loss is noticed however long ago it was. Pure.

A role of a model is wanted from its first ready rank on, until its last rank said goodbye and none that it had is
lost; or until an operator drains the role. A declared role (`--expect`) is always wanted. This module keeps that
list, which outlives what the load table knows of lost ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bus.errors import ConfigError
from bus.wire.messages import MemberKey, RankState, Role, WantedRole
from controller.load.rank import RankLoad

GROUPS_MAX = 128  # remembered; further ones, of a program that invents models, are ignored
RANKS_MAX = 4_096  # of a group; the first that was heard of is forgotten
ROLES: tuple[Role, ...] = ("prefill", "decode", "unified")
Group = tuple[Role, str]  # a role and a model; an empty one stands for any


def expected(text: str) -> Group:
    """Return the group (role, and model or empty) in `ROLE` or `ROLE:MODEL`. Raises ConfigError for any other text."""
    name, _, model = text.partition(":")
    for role in ROLES:
        if role == name and len(model) <= 128:
            return role, model
    raise ConfigError(f"expect {text!r}: write {', '.join(ROLES)}, or one of them with a model as in decode:MODEL")


class Wanted:
    """The wanted roles of one controller. `declared` are those of `--expect`."""

    def __init__(self, declared: Iterable[str] = ()) -> None:
        self._declared = {expected(text) for text in declared}
        self._wanted: set[Group] = set()
        self._ranks: dict[Group, dict[MemberKey, RankState]] = {}  # those that did not say goodbye, lost ones too

    def changed(self, rank: RankLoad, state: RankState) -> None:
        """Note that `rank` is new, or is now in this state."""
        group = rank.info.role, rank.info.model
        if group not in self._ranks and len(self._ranks) >= GROUPS_MAX:
            return
        ranks = self._ranks.setdefault(group, {})
        ranks.pop(rank.key, None)
        if state != "gone":
            ranks[rank.key] = state
            if len(ranks) > RANKS_MAX:
                del ranks[next(iter(ranks))]
        if state == "ready":
            self._wanted.add(group)
        if not ranks:
            self._forget(group)

    def drained(self, role: Role, model: str) -> None:
        """Note that an operator takes a role out of service, of one model or of all (empty)."""
        for group in [group for group in self._ranks if group[0] == role and model in ("", group[1])]:
            self._forget(group)

    def now(self, ranks: Iterable[RankLoad]) -> Iterator[WantedRole]:
        """Yield what is wanted, with the number of ready ranks for it among `ranks`."""
        ready = [(rank.info.role, rank.info.model) for rank in ranks if rank.ready]
        for role, model in sorted(self._declared | self._wanted):
            count = sum(role == each and model in ("", of) for each, of in ready)
            yield WantedRole(role, model, count, (role, model) in self._declared)

    def _forget(self, group: Group) -> None:
        self._wanted.discard(group)
        self._ranks.pop(group, None)
