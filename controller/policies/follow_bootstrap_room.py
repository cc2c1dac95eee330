"""`follow_bootstrap_room`: `bootstrap_room % dp_size`, so that a decode rank can compute where the prefill ran."""

from __future__ import annotations

from bus.wire.messages import Submit
from controller.load.groups import View
from controller.load.rank import RankLoad
from controller.policies.base import Policy


class FollowBootstrapRoom(Policy):
    """Never another rank than the one that decode computes: where it is not ready, there is none. Of several
    instances, the one whose rank had its turn longest ago. Requests without a room have no rank."""

    fixed = True

    def pick(self, view: View, request: Submit, tokens: int) -> RankLoad | None:
        room = request.bootstrap_room
        if room is None:
            return None
        chosen: RankLoad | None = None
        for ranks in view.instances():
            dp_size = next(iter(ranks.values())).info.dp_size if ranks else 1
            rank = ranks.get(room % dp_size)
            if rank is not None and rank.ready and (chosen is None or rank.last_turn < chosen.last_turn):
                chosen = rank
        return chosen
