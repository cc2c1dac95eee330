"""What must hold, whatever befalls: for each token, each end, at each moment, and at rest.

Each check raises Broken with the law's name. `docs/guarantees.md` says them in prose.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from nodes.own.engines.sim import SPECIALS, feed
from simulation.broken import Broken
from simulation.ledger import POISON, may_die_of
from simulation.network import RECONNECT_MAX_S
from simulation.process import NodeProcess, Process
from simulation.spec import HOLD_S, VOCAB, Fault
from simulation.story import message_in

if TYPE_CHECKING:
    from simulation.process import ControllerProcess
    from simulation.world import Asked, World

FORGET = frozenset(
    {"crash", "leave", "twice", "hang", "drain", "revoke"}
)  # who wanted a leg may be gone, its rank held up
TAIL_S = 15.0  # for so long after its end a fault may be felt
NEVER = frozenset({"duplicate_room", "too_long", "bad_room", "bad_rank", "bad_request", "bad_message", "empty_prompt"})
RID_S = 130.0  # for so long ranks remember the ends of a rid
EARLY_S, EARLY_TRIES = 4.0, 3  # a failure that a new try may mend is final after so long, or so many tries
QUICK = frozenset({"crash", "reset_one", "reset_all", "leave", "drain", "fail_steps", "clock", "damage", "drop"})
FEW = 5  # tries that one of these may cost, where the cluster does not lack ranks
LOAD = frozenset({"overloaded", "no_rank", "too_many", "rank_unavailable", "draining"})  # it does
WAITS_S = 2.0  # beside a rank that would take it
NEW_S = 1.2  # a start that is refused before it serves asks again so soon
TOLD_S = 0.5  # until a start of a rank leaves that a later one has replaced
KNOWS_S = 4.0  # until controllers and ranks that reach each other agree on what runs
SHARED_S = 8.0  # of a rid that several requests have: a rank waits 2 s for the one that never came, its client 2 s more
RECENT_S = 8.0  # after its end a fault is no reason any more for a try that fails
SILENT_S = 5.0
LET_GO_S = 20.0  # after a key was let go of nothing of its is computed
AT_REST = ("beacon", "ping", "pong", "member", "load", "sent", "rooms", "hello", "welcome", "query", "topology",
           "resync", "who")  # fmt: skip


Ranks: TypeAlias = dict[tuple[str, int], tuple[NodeProcess, Any]]


class Output:
    """The tokens that a request may have: each follows from those before it, by one of the runs there are."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._state = feed(prompt)[-1]
        self.ids: list[int] = []

    def take(self, ids: tuple[int, ...], salts: set[int]) -> bool:
        """Add tokens and return true, or return false at the first that may not follow."""
        for token in ids:
            if (token - SPECIALS - self._state) % (VOCAB - SPECIALS) not in salts:
                return False
            self._state = feed((token,), self._state)[0]
            self.ids.append(token)
        return True


def end(world: World, asked: Asked) -> None:
    """Check that a request may end like this."""
    result, spec = asked.result, asked.spec
    assert result is not None
    lived_s = world.now - asked.began
    how = f"{result.attempts} attempts, {lived_s:.2f} s: {result.code}, {result.message}"
    who = f"{asked.rid} (request {spec.number}), {how}"

    def broken(law: str, why: str) -> Broken:
        return Broken(law, f"{who}: {why}", asked.rid)

    if result.ids != tuple(asked.output.ids):
        raise broken("it delivers what it says", f"{result.ids}, delivered {asked.output.ids}")
    cancelled = result.code == "cancelled" or (result.code == "ok" and result.finish == "cancelled")
    if why := _no_cause(world, asked, "cancelled" if cancelled else result.code):
        raise broken("no end without a cause", why)
    felt = _felt(world, asked)
    if not world.spec.faults and max(_killed(asked).values(), default=0) > POISON:
        raise broken("a request takes few ranks down", f"{asked.killed}")
    lapsed = spec.prefill_controller >= 0 and lived_s > HOLD_S  # its decode leg waited longer than a KV cache is held
    namesakes = _namesakes(world, asked)
    again = namesakes or asked.rid in world.turned_down or lapsed
    match result.code:
        case "ok" if not felt and result.attempts > 1 and not again:
            raise broken("what no fault touches takes one try", "")
        case "ok" | "cancelled":
            if not cancelled and len(asked.output.ids) != spec.max_tokens:
                raise broken("it is whole", f"{len(asked.output.ids)} tokens of {spec.max_tokens}")
        case "deadline" | "duplicate_rid":
            pass
        case "poison":
            deaths = sum(may_die_of(world, fault) for fault in felt)
            if deaths < POISON:
                raise broken("no end without a cause", f"{deaths} ranks may have died of {felt}")
        case "engine_failed":
            if not any(fault.kind == "fail_steps" for *_, fault in world.befell):  # an idle engine fails its next step
                raise broken("no end without a cause", "no step failed")
        case "decode_failed" if _waits_for_decode(world, asked):
            pass
        case "prefill_failed" | "unknown_room" if lapsed:  # what its last try met
            pass
        case "overloaded" if asked.rid in world.turned_down:
            pass
        case "too_many" if "client_requests" in dict(world.spec.settings):
            pass
        case _ if any(not other.ended or other.ended >= asked.began for other in namesakes):
            pass  # a try of either may end what the other's runs
        case _:
            if not any(until - TAIL_S + RECENT_S >= world.now for _, until, _ in world.befell):
                raise broken("no end without a cause", "nothing has befallen anybody of late")
            if lived_s < EARLY_S and result.attempts < EARLY_TRIES:
                raise broken("no client gives up early", "")
            if result.code not in LOAD and len(felt) <= 1 and result.attempts > FEW and _is_quick(felt):
                raise broken("a fault costs few tries", f"{felt}")


def _killed(asked: Asked) -> Counter[int]:
    """Return how many processes died of it between two of its tokens, by the number of tokens before. Its client had so
    many when it submitted what killed the next one, or at its end."""
    offsets = [*(offset for _, offset in asked.killed[1:]), len(asked.output.ids)]
    return Counter(offsets[: len(asked.killed)])


def _namesakes(world: World, asked: Asked) -> list[Asked]:
    return [other for other in world.asked if other.rid == asked.rid and other is not asked]


def _waits_for_decode(world: World, asked: Asked) -> bool:
    """Return whether its decode leg waits at another controller than its prefill leg's: its KV cache may lapse."""
    if asked.spec.prefill_controller < 0:
        return False
    controller = world.controllers[asked.spec.controller]
    request = controller.part.core.life.requests.get(asked.rid) if controller.alive else None
    return request is not None and request.lane is not None


def _is_quick(felt: list[Fault]) -> bool:
    return all(fault.kind in QUICK for fault in felt)


def _no_cause(world: World, asked: Asked, code: str) -> str:
    """Return why nothing that its caller did can have ended it with `code`; empty: something may have."""
    if code in NEVER:
        return "nothing is wrong with it"
    if code == "cancelled" and not asked.cancelled:
        return "no client cancelled it"
    if code == "deadline" and (not asked.spec.deadline_s or world.now - asked.began < asked.spec.deadline_s - 0.01):
        return "it has no deadline, or that is not over"
    others = _namesakes(world, asked) if code == "duplicate_rid" else []
    if code == "duplicate_rid" and all(other.ended and other.ended <= asked.began - RID_S for other in others):
        return "no other request has its rid"
    return ""


def _felt(world: World, asked: Asked) -> list[Fault]:
    return [fault for since, until, fault in world.befell if since <= world.now and until >= asked.began]


def end_unread(world: World, asked: Asked, code: str) -> None:
    """Check that a dispatch may end with `code`. Its tokens are read elsewhere."""
    why, caused = _no_cause(world, asked, code), code in ("ok", "cancelled", "deadline", "duplicate_rid")
    caused = caused or (code == "overloaded" and asked.rid in world.turned_down)
    if not why and not caused and not _felt(world, asked):
        why = "nothing has befallen anybody"
    if why:
        raise Broken("no end without a cause", f"{asked.rid} (request {asked.spec.number}), {code}: {why}", asked.rid)


def at_any_moment(world: World) -> None:
    """Cores agree with themselves and, before long, with each other; nobody waits beside a rank that would take it."""
    for process in world.processes:
        if process.alive:
            process.validate()
    for controller in world.controllers:
        if controller.alive and controller.paused_until <= world.now:
            _work_conservation(world, controller)
    _agreement(world)
    for name, since in world.revoked.items():
        if world.now - since > LET_GO_S:
            _let_go_of(world, world.by_name[name].key)


def _let_go_of(world: World, key: str) -> None:
    """No rank runs anything for a client whose key was revoked long ago."""
    for node in world.nodes:
        if node.alive and not world.felt(node.name):
            for number, rank in node.part.host.ranks.items():
                for leg in rank.core.legs:
                    if leg.client == key and not leg.continue_on_disconnect:
                        raise Broken("a revoked key is let go of", f"{node.name}/{number} runs {leg} of {key}", leg.rid)


def _agreement(world: World) -> None:
    """What a controller takes for running its rank has, and what a rank runs some controller or client wants; but for
    KNOWS_S of steady connections. What a prefill rank keeps for one that never says it has it, is kept for a while."""
    now = world.now
    wanted = {asked.rid for asked in world.asked if asked.lives}
    ranks: Ranks = {}
    for node in world.nodes:
        if node.alive and not node.loop.stopping and _steady(world, node):
            for number, rank in node.part.host.ranks.items():
                ranks[node.config.instance, number] = node, rank
    odd: dict[tuple[Any, ...], str] = {}
    for controller in world.controllers:
        if not controller.alive:
            continue
        core = controller.part.core
        wanted.update(core.life.requests)
        for key, load in core.table.ranks.items():
            rank = ranks[key][1] if key in ranks else None
            if rank is None or not load.ready or rank.epoch != load.epoch or not _steady(world, controller):
                continue
            legs = rank.core.legs
            for rid, (request, _) in core.members.ranks[load].work.items():
                leg = legs.get(rid)
                if leg is None or leg.attempt != request.attempt:
                    odd[controller.name, key, rid, request.attempt] = f"{controller.name} takes it for running at {key}"
            for leg in legs:
                request = core.life.requests.get(leg.rid)
                if request is None or not request.legs or leg.attempt >= request.attempt:
                    continue
                if leg.submit_room == request.submit.bootstrap_room:
                    what = f"{key} runs it beside attempt {request.attempt} of {controller.name}"
                    odd[controller.name, key, leg.rid, leg.attempt] = what
    forgetful = {fault.who for _, until, fault in world.befell if fault.kind in FORGET and until > now}
    asks = [each for each in world.processes if each.kind not in ("node", "broker")]
    if all(_steady(world, each) and each.name not in forgetful for each in asks):
        attempts = _attempts(world) if world.knows_all_faults else {}
        for key, (node, rank) in ranks.items():
            if node.name.partition("'")[0] in forgetful:
                continue
            for rid, leg in ((leg.rid, leg) for leg in rank.core.legs if leg.role != "prefill"):
                if rid not in wanted:
                    odd[node.name, key, rid, leg.attempt] = f"{node.name} runs it for nobody at {key}: {leg}"
                elif leg.attempt not in attempts.get(rid, (leg.attempt,)):
                    odd[node.name, key, rid, leg.attempt] = f"{node.name} runs what was given up at {key}: {leg}"
    there = any(each.alive and each.began < now - RECONNECT_MAX_S for each in world.controllers)
    if world.knows_all_faults and there and all(_steady(world, each) for each in world.controllers):
        odd |= _twins(world)
    if world.knows_all_faults and not any(until > now for _, until, _ in world.befell):
        odd |= _kept(ranks, {asked.rid for asked in world.asked if asked.lives})
    odd |= _on_the_way(world, ranks)
    of_rid = Counter(asked.rid for asked in world.asked) if odd else Counter()
    for each in list(world.odd):
        if each not in odd:
            del world.odd[each]
    for each, what in odd.items():
        most_s = TOLD_S if each[0] == "twins" else SHARED_S if of_rid[each[2]] > 1 else KNOWS_S
        if now - world.odd.setdefault(each, now) > most_s:
            whose = f"{each[2]}, attempt {each[3]}: " if each[2] else ""
            raise Broken("controllers and ranks agree", f"{whose}{what}", each[2])


def _attempts(world: World) -> dict[str, set[int]]:
    """Return the attempts that controllers and clients have of requests that no other has the rid of."""
    attempts: dict[str, set[int]] = {}
    for controller in world.controllers:
        for rid, request in controller.part.core.life.requests.items() if controller.alive else ():
            attempts.setdefault(rid, set()).add(request.attempt)
    for client in world.clients:
        for rid, request in client.traffic._core._requests.items() if client.alive else ():
            if request.endpoint and rid in attempts:
                attempts[rid].add(request.attached)
    of_rid = Counter(asked.rid for asked in world.asked)
    return {rid: some for rid, some in attempts.items() if of_rid[rid] == 1}


def _twins(world: World) -> dict[tuple[Any, ...], str]:
    """Return ranks of which two starts serve, where a controller reaches both and the earlier one is not new itself: a
    start that is refused before it serves asks again a second later."""
    serving: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for node in world.nodes:
        if node.alive and node.ready and _steady(world, node):
            for number, rank in node.part.host.ranks.items():
                if rank.state == "ready" and node.part.host.serving:
                    serving.setdefault((node.config.instance, number), []).append((node.began, node.name))
    return {
        ("twins", key, "", 0): f"{starts} serve {key}"
        for key, starts in serving.items()
        if len(starts) > 1 and sorted(starts)[-2][0] < world.now - NEW_S
    }


def _kept(ranks: Ranks, wanted: set[str]) -> dict[tuple[Any, ...], str]:
    """Return KV caches of requests that are over."""
    return {
        (node.name, key, leg.rid, leg.attempt): f"{node.name} keeps its KV cache for nobody at {key}: {leg}"
        for key, (node, rank) in ranks.items()
        for leg in rank.core.legs
        if leg.role == "prefill" and leg.rid.removesuffix(".prefill") not in wanted
    }


def _on_the_way(world: World, ranks: Ranks) -> dict[tuple[Any, ...], str]:
    """Return dispatches that a controller takes for unread, though it has sent nothing since."""
    odd: dict[tuple[Any, ...], str] = {}
    for controller in world.controllers:
        for key, load in controller.part.core.table.ranks.items() if controller.alive else ():
            rank = ranks[key][1] if key in ranks and _steady(world, controller) else None
            if rank is not None and rank.epoch == load.epoch and load.in_flight and not load.stale:
                what = f"{load.in_flight} dispatches to {key} are on their way"
                odd[controller.name, key, str(load.epoch), load.sent] = what
    return odd


def _steady(world: World, process: Process) -> bool:
    return world.unsteady.get(process.name, 0.0) <= world.now


def _work_conservation(world: World, controller: ControllerProcess) -> None:
    core = controller.part.core
    if not core.balancer.settled or core.config.queue_order != "arrival":
        return
    free = {(rank.info.model, rank.info.role) for rank in core.table.ranks.values() if rank.candidate}
    avoiding = {request.lane for request in core.life.queue if request.avoid}  # some ranks are none for these
    stuck = {
        lane
        for lane in core.life.queue.lanes()
        if not (lane.pinned or lane.apart or lane in avoiding)
        and all((lane.model, role) in free for role in lane.roles)
    }
    for lane in list(controller.waits):
        if lane not in stuck:
            del controller.waits[lane]
    for lane in stuck:
        since = max(controller.waits.setdefault(lane, world.now), controller.paused_until)
        if world.now - since > WAITS_S:
            head = core.life.queue.head(lane)
            rid = head.rid if head is not None else ""
            raise Broken("no request waits beside a free rank", f"{controller.name}, {lane}: {head}", rid)


def message_at_rest(world: World, frames: list[bytes], ends: str) -> None:
    """Once all is over an idle cluster says only that it lives."""
    tag, *fields = message_in(frames)
    looks = tag in ("status", "status_is") and "edge-" in ends  # an edge does, each second
    if tag not in AT_REST and not looks:
        raise Broken("an idle cluster is silent", f"{ends}: {tag} {fields}")


def at_rest(world: World) -> None:
    """All is over, and has been for a while: nobody waits, and nobody holds or believes anything any more."""
    for asked in world.asked:
        if asked.lives:
            raise Broken("it ends", f"{asked.rid} (request {asked.spec.number}), from {asked.began:.3f} on", asked.rid)
        if asked in world.killed_late:
            why = f"{asked.rid}, over at {asked.ended:.3f}, killed ranks at {asked.killed}"
            raise Broken("what is over takes no rank down", why, asked.rid)
    there: dict[tuple[str, int], NodeProcess] = {}
    for node in world.nodes:
        if node.replaced:
            continue
        if not node.alive:
            raise Broken("at rest", f"{node.name} is down: {node.failure!r}")
        for number, rank in node.part.host.ranks.items():
            if (node.config.instance, number) in there:
                raise Broken("at rest", f"{node.name} and {there[node.config.instance, number].name} both live")
            there[node.config.instance, number] = node
            held = len(rank.core), *node.held(number)
            if any(held):
                raise Broken(
                    "at rest", f"{node.name}/{number} has (legs, sequences, ...) {held}: {list(rank.core.legs)}"
                )
    for controller in world.controllers:
        _controller_at_rest(controller, there)
    for process in world.processes:
        if process.alive and (left := process.left_over()):
            raise Broken("at rest", f"{process.name} has {left}")
    core = world.broker.part.core
    connected = {pipe.id for socket in world.broker.open_sockets for pipe in socket.pipes if pipe.peer is not None}
    for room, watchers in core.watches._by_room.items():
        if any(peer in connected for peer, _ in watchers):  # those of a connection that is gone end at their time
            raise Broken("at rest", f"{room} is watched at the broker, {core.tally()}")
    hit = {name for _, _, fault in world.befell for name in (fault.who, fault.other)}  # what they say may be lost
    nodes = [node for node in world.nodes if node.alive and not hit & {"broker", node.name}]
    epochs = {rank.epoch for node in nodes for rank in node.part.host.ranks.values()}
    for shard in core.rooms._shards:
        for room, claim in shard.items():
            if claim.code == "ok" and claim.owner.live and claim.owner.location.epoch in epochs:
                raise Broken("at rest", f"the broker takes room {room} for being prefilled at {claim.owner.location}")


def _controller_at_rest(controller: ControllerProcess, there: dict[tuple[str, int], NodeProcess]) -> None:
    core = controller.part.core
    if core.life.requests:
        raise Broken("at rest", f"{controller.name} has {list(core.life.requests.values())[:3]}")
    if core.table.ranks.keys() != there.keys():
        raise Broken("at rest", f"{controller.name} knows {sorted(core.table.ranks)}, there are {sorted(there)}")
    for key, rank in core.table.ranks.items():
        if not rank.ready:
            raise Broken("at rest", f"{controller.name} holds {rank} for {core.health.liveness[key].state}")
        believed = rank.requests, rank.outstanding, rank.outstanding_tokens, rank.others_requests, rank.others_tokens
        if any(believed) or (rank.counts_queue_only and rank.tokens):
            raise Broken("at rest", f"{controller.name} believes of {rank}: {believed}, {rank.tokens}")
