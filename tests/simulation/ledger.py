"""Which fault may have cost a rank its life, as controllers see it: the ledger of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bus.defaults import LEASE_S
from simulation.spec import OVER_TCP, Fault

if TYPE_CHECKING:
    from simulation.world import World

# of a node: its controllers lose its ranks; of one that drains, where its goodbye is lost
LOST = frozenset({"crash", "pause", "hang", "twice", "revoke", "drain"})
POISON = 3  # ranks that died with a request
ENDS = ("controller", "node")  # of a connection whose loss may be taken for a death
STEADY_S = 2.0  # a lease may be as short as a connection that flaps is away; longer where it flaps twice over


def may_die_of(world: World, fault: Fault) -> int:
    """Return how many ranks a controller may have lost by it one after the other, with a request that it gave to one of
    them after the other. Those of a process that dies are lost at once; engines hang each for itself."""
    kinds = {world.by_name[name].kind for name in (fault.who, fault.other) if name}
    lease_s = dict(world.spec.settings).get("lease_s", LEASE_S)
    if fault.kind == "flap":
        return POISON if lease_s < STEADY_S * _flaps_with(world, fault) else 0
    if fault.kind == "sever":
        return fault.for_s > lease_s - 1.0 and kinds != {"node"} and "node" in kinds
    if fault.kind in OVER_TCP:
        return {"node", "controller"} <= kinds
    if fault.kind not in LOST or kinds != {"node"}:
        return 0
    node: Any = world.by_name[fault.who]
    return 1 + (len(node.config.dp_ranks) if fault.kind == "hang" else 0)


def _flaps_with(world: World, fault: Fault) -> int:
    """Return how many times ends of such a connection flap while `fault` lasts, itself among them."""
    flaps = [each for _, _, each in world.befell if each.kind == "flap" and world.by_name[each.who].kind in ENDS]
    return sum(each.at_s < fault.at_s + fault.for_s and fault.at_s < each.at_s + each.for_s for each in flaps)
