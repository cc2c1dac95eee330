"""What must hold inside each part, at any moment and at rest: of what nobody outside can see before it is too late.

They look at the records of cores, and say once more, in their own words, what these promise. Each raises Broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from laws import check, of_controller

from controller.requests.request import ROLES
from nodes.link.reports import REMEMBER_S
from nodes.link.streams import ATTACH_GRACE_S
from pdbus.client.request import State
from simulation.broken import Broken
from simulation.ledger import POISON, may_die_of
from simulation.network import Frames, Pipe
from simulation.process import ClientProcess, ControllerProcess, NodeProcess, RankProcess
from simulation.story import message_in

if TYPE_CHECKING:
    from simulation.world import Asked, World

UNREAD_S = 12.0  # a leg whose client has gone ends before
SILENCE_S = 8.0  # a stream that shows no sign of life for so long is given up before
ANSWERED_S = 1.5  # a controller has said by then that a request waits
KEPT_S = 15.0  # a message may wait for so long at a process that is paused
AWAKE_S = 1.0  # a process that was paused has looked at all that came meanwhile


def at_any_moment(world: World) -> None:
    _spared(world)
    for process in world.processes:
        if not process.alive or process.paused_until + AWAKE_S > world.now:
            if process.alive and isinstance(process, RankProcess):
                _asleep(world, process)
            continue
        if isinstance(process, ControllerProcess):
            _estimates(process)
            _requests(world, process)
            _apart(world, process)
        elif isinstance(process, NodeProcess):
            _readers(world, process)
            _acknowledged(world, process)
            _memory(process)
        elif isinstance(process, ClientProcess):
            _tries(world, process)


def _spared(world: World) -> None:
    """A cancel ends legs of its own request, whatever others have its rid."""
    for leg, code, when in world.spared:
        if not leg.live and (leg.code, leg.message) == (code, "") and leg.ended_at >= when:
            raise Broken("a cancel ends its own request alone", f"{leg}", leg.rid)
    world.spared = [each for each in world.spared if each[0].live and each[2] + KEPT_S > world.now]


def _estimates(controller: ControllerProcess) -> None:
    """A rank's load is its last report and what is on its way there: of this controller, and of each other one by what
    that says it sent and the report acknowledges."""
    core = controller.part.core
    mine = core.table.controller_epoch
    for key, rank in core.table.ranks.items():
        if rank.stale or rank.load is None:
            continue
        requests, tokens = rank.load.running + rank.load.waiting + rank.sent - rank.acked, 0
        for ack in rank.load.acks:
            if ack.controller_epoch != mine:
                sent, sent_tokens = rank.others.get(ack.controller_epoch, (0, 0))
                requests += max(0, sent - ack.dispatches)
                tokens += max(0, sent_tokens - ack.tokens)
        if (rank.requests, rank.others_tokens) != (requests, tokens):
            raise Broken(
                "an estimate is the last report and what is on its way",
                f"{controller.name} takes {key} for {rank.requests} requests, {rank.others_tokens} tokens of others, "
                f"where {requests}, {tokens} follow",
            )


def _requests(world: World, controller: ControllerProcess) -> None:
    """Each is at ranks that are there, was tried no oftener than it may be, and left nothing of a former controller's
    running; no client has more than it may."""
    core = controller.part.core
    life = core.life
    for request in life.requests.values():
        if request.losses and world.knows_all_faults and request.losses > _deaths(world, request.rid):
            raise Broken("a loss is a rank that died", f"{controller.name}: {request.losses} of {request}", request.rid)
        if request.lane is not None and core.config.queue_order == "slo" and request.work != _work(core, request):
            raise Broken("the queue knows what each is to compute", f"{controller.name}: {request.work}", request.rid)
        if request.tries > core.config.attempts:
            raise Broken("a submit has so many tries", f"{controller.name}: {request}", request.rid)
        for leg in request.legs:
            if leg.state.value == "running" and core.table.ranks.get(leg.rank.key) is not leg.rank:
                raise Broken("no request waits for a rank that is gone", f"{controller.name}: {request}", request.rid)
    for rid, (_, losses, *_) in life.table._losses.items():
        if world.knows_all_faults and not 0 < losses <= _deaths(world, rid):
            raise Broken("a loss is a rank that died", f"{controller.name}: {losses} of {rid}, which is over", rid)
    for rid, held in life.table.orphans._held.items():
        live = life.requests.get(rid)
        if live is None or not live.legs:
            continue
        for each in held:
            if each.client not in (None, live.client):  # another's, who asked for it under the same rid
                continue
            pulse = core.health.liveness.get(each.rank.key)
            if pulse is None or pulse.epoch != each.rank.epoch:
                continue
            newest = live.attempt - (each.rank.load.info.role == "prefill")  # whose KV cache may be fetched
            if pulse.hello_at >= live.legs[0].began and each.attempt > newest:
                continue
            if live.tries <= 1 or _runs(world, each.rank, rid, each.attempt):  # a later try asks for none
                raise Broken("what still runs is taken over, or ends", f"{controller.name}: {rid} at {each}", rid)
    if not world.befell:  # who comes back over another connection brings what it has
        most = max(life.table._of_client.values(), default=0)
        if most > core.config.client_requests:
            raise Broken("a client has so many requests", f"{controller.name}: one has {most}")


def _apart(world: World, controller: ControllerProcess) -> None:
    """What comes again after ranks may have died of it is marked, so that it shares no rank with another such one."""
    life, few = controller.part.core.life, max(2, controller.part.core.config.attempts - 1)
    deadly = world.deadly.get((controller.name, controller.starts), {})
    for rid, request in life.requests.items():
        offset = request.submit.offset
        if deadly.get(rid) == offset and life.losses.of(request) >= few and not request.apart:
            raise Broken("what may kill ranks is kept apart", f"{controller.name}: {request}", rid)
    unclear = life.losses.unclear
    known = {rid: offset for lost in unclear.at.values() for rid, (offset, _) in lost.items()}
    died = {rid: (offset, losses) for rid, (offset, losses, *_) in life.table._losses.items()}
    known |= {rid: offset for rid, (offset, _) in died.items()}
    world.deadly[controller.name, controller.starts] = {
        rid: offset
        for rid, offset in known.items()
        if rid not in life.requests and died.get(rid, (offset, 0))[1] + unclear.count(rid, offset) >= few
    }


def _runs(world: World, rank: Any, rid: str, attempt: int) -> bool:
    """Return whether a rank, as a controller knows it, runs this attempt."""
    ranks = [rank for node in world.nodes if node.alive for rank in node.part.host.ranks.values()]
    legs = [each.core.legs.get(rid) for each in ranks if each.epoch == rank.epoch]
    return any(leg is not None and leg.attempt == attempt for leg in legs)


def _deaths(world: World, rid: str) -> int:
    """Return how many ranks may have died with the requests of a rid."""
    own = rid.removesuffix(".prefill")
    began = min((asked.began for asked in world.asked if asked.rid == own), default=0.0)
    felt = [fault for _, until, fault in world.befell if until >= began]
    return sum(POISON if fault.kind == "slow" else may_die_of(world, fault) for fault in felt)


def _work(core: Any, request: Any) -> int:
    """Return the prompt tokens that its first rank has to compute, where that depends on no cache."""
    first = ROLES[request.submit.leg][0]
    return request.submit.prompt_tokens if core.policies[first].prefixes is None else request.work


def _readers(world: World, node: NodeProcess) -> None:
    """What nobody reads ends; sooner where others wait for its place."""
    for number, rank in node.part.host.ranks.items():
        waiting = rank.runner.load().waiting if len(rank.core) > 1 else 0
        which = node.name, node.starts, number
        crowded_at = world.crowded[which] = world.crowded.get(which, world.now) if waiting else world.now
        crowded = world.now - max(crowded_at, node.paused_until) > AWAKE_S
        for leg in rank.core.legs:
            if leg.role == "prefill" or leg.reader is not None or leg.continue_on_disconnect:
                continue
            if node.part.host.streams._legs.get(leg.rid) is not leg:
                since = world.unstreamed.setdefault((node.name, node.starts, number, leg.seq), world.now)
                if world.now - max(since, node.paused_until) > AWAKE_S:
                    raise Broken("a leg can be read", f"{node.name}/{number}: {leg}", leg.rid)
                continue
            unread_s = world.now - max(leg.unread_since, node.paused_until)
            unclaimed_s = node.part.host.streams.unclaimed_s(leg, world.now) if waiting else 0.0
            in_the_way = crowded and min(unclaimed_s, unread_s) > ATTACH_GRACE_S + AWAKE_S
            if unread_s > UNREAD_S or in_the_way:
                what = f"{node.name}/{number}, {waiting} wait since {crowded_at:.2f}, {unread_s:.2f} s unread: {leg}"
                raise Broken("an unread leg ends", what, leg.rid)


def _acknowledged(world: World, node: NodeProcess) -> None:
    """Each dispatch that came is acknowledged, also one that was refused."""
    for number, rank in node.part.host.ranks.items():
        for epoch, (last, _) in rank.core.reports._acks.items():
            came, when, socket = world.came.get((node.name, node.starts, number, epoch), (0, 0.0, None))
            if came > last and not socket.closed and world.now - max(when, node.paused_until) > AWAKE_S:
                why = f"{node.name}/{number} acknowledges {last}, number {came} came at {when:.3f}"
                raise Broken("each dispatch that comes is acknowledged", why)


def _memory(node: NodeProcess) -> None:
    """What a rank says of its KV memory is what its scheduler holds, and fits in it."""
    sent_bytes = 0
    for number, rank in node.part.host.ranks.items():
        scheduler, load = getattr(rank.runner, "scheduler", None), rank.core.figures()
        sent_bytes += rank.core._kv_sent_bytes
        if scheduler is None:
            continue
        pool = scheduler.pool
        free = sum(not held for held in pool._references)
        lent = {block for table in scheduler._lent.values() for block in table}
        held = sum(leg.prompt_tokens for leg in rank.core.legs if leg.state.value == "holding")
        apart = load.kv_pinned if rank.core.role == "decode" else 0
        computes = sum(each.expected for each in scheduler._sequences.values() if not each.imported)
        if load.to_compute_tokens != computes or computes > load.waiting_tokens:
            raise Broken("what a rank is to compute is what no other computes for it", f"{node.name}/{number}: {load}")
        if (
            load.kv_cached != pool.block_tokens * (free - len(pool._free))
            or load.kv_tokens + load.kv_cached + apart > pool.blocks * pool.block_tokens
            or (rank.core.role != "decode" and load.kv_pinned != min(held, load.kv_tokens))
            or (rank.core.role == "decode" and bool(load.kv_pinned) > bool(lent))
        ):
            raise Broken("a rank's memory is what its scheduler holds", f"{node.name}/{number}: {load}, {held} held")
    if node.part.host.kv.sent_bytes != sent_bytes:
        raise Broken("KV bytes are some rank's", f"{node.name}: {node.part.host.kv.sent_bytes}, {sent_bytes} of ranks")


def _tries(world: World, client: ClientProcess) -> None:
    """A request that has to be tried again is, when that is due; a client that receives nothing from a rank looks for
    another; and a stream fails by the word of the rank that it is read from."""
    for request in client.traffic._core._requests.values():
        told = client.name, request.endpoint, request.rid, request.attached
        if request.state is State.AWAITING_VERDICT and told not in world.failures:
            raise Broken("a stream fails by its own rank's word", f"{client.name}: {request}", request.rid)
        if request.state is State.BACKOFF and request.due_at < world.now - AWAKE_S:
            raise Broken("a try waits its time", f"{client.name}: {request}, due at {request.due_at}", request.rid)
        if request.state is State.RUNNING and request.endpoint:
            heard = world.spoke.get((request.endpoint, client.name), 0.0)
            attached = world.attached.setdefault((client.name, request.rid, request.attached), world.now)
            since = max(heard, attached, client.paused_until)
            if world.now - since > SILENCE_S:
                raise Broken("a client that receives nothing looks elsewhere", f"{client.name}: {request}", request.rid)


# --- messages -------------------------------------------------------------------------------------------------------


def arrives(world: World, pipe: Pipe, frames: Frames) -> None:
    """A message is there, for the process at the other end."""
    speaker, hearer = pipe.socket.process, pipe.peer.socket.process if pipe.peer is not None else None
    if hearer is None:
        return
    if isinstance(hearer, ClientProcess):
        endpoint = pipe.peer.socket.endpoint  # type: ignore[union-attr]
        world.spoke[endpoint, hearer.name] = world.now
        if frames[0][:16].find(b"tokens") > 0:
            _, rid, attempt, _, _, finish, *_ = [*message_in(frames), ""]
            if finish not in ("", "stop", "length"):
                world.failures.add((hearer.name, endpoint, rid, attempt))
    if not isinstance(speaker, ControllerProcess):
        return
    if hearer.kind == "client" and frames[0][:16].find(b"failed") > 0:
        _, rid, _, code, *_ = message_in(frames)
        refused(world, speaker, rid, code)
    elif hearer.kind == "node":
        if frames[0][:16].find(b"cancel_leg") > 0:
            _given_up(world, speaker, hearer, pipe, frames)
        elif frames[0][:16].find(b"dispatch") > 0:
            _dispatched(world, speaker, hearer, pipe, frames)


def refused(world: World, controller: ControllerProcess, rid: str, code: str) -> None:
    """The only rank that a room has may be full."""
    by_room = "follow_bootstrap_room" in controller.part.core.config.methods.values()
    if code == "overloaded" and by_room and rid not in world.dispatched:
        world.turned_down.add(rid.removesuffix(".prefill"))


def _dispatched(world: World, controller: ControllerProcess, node: NodeProcess, pipe: Pipe, frames: Frames) -> None:
    """Its dispatches are counted; and of a request that was submitted again each try has a number of its own."""
    _, rid, attempt, leg, dp_rank, epoch, number, _, _, _, _, room = [*message_in(frames), *([None] * 12)][:12]
    world.dispatched.setdefault(rid, world.now)
    socket = pipe.peer.socket  # type: ignore[union-attr]
    if not node.alive or socket.closed:  # of an earlier start, of whose end its controller has not heard
        return
    key = node.name, node.starts, dp_rank, epoch
    world.came[key] = max(world.came.get(key, (0,))[0], number), max(world.now, node.paused_until), socket
    live = controller.part.core.life.requests.get(rid) if controller.alive else None
    if live is None or (live.attempt, live.submit.bootstrap_room) != (attempt, room):
        return
    key = controller.name, controller.starts, rid, room, attempt, leg
    first, before = world.tries.setdefault(key, (live.submit.attempt, number))
    if number != before and live.submit.attempt > first:
        why = f"attempt {attempt} of submit {live.submit.attempt} had been dispatched for submit {first}"
        raise Broken("each try has a number of its own", f"{controller.name}: {why}", rid)


def _given_up(world: World, controller: ControllerProcess, node: NodeProcess, pipe: Pipe, frames: Frames) -> None:
    """A controller gives no attempt up for an older one; and what is given up at a rank does not begin there."""
    _, rid, attempt, code, if_unfetched, _, room = [*message_in(frames), *([None] * 6)][:7]
    if not node.alive:
        return
    for rank in node.part.host.ranks.values():
        leg = rank.core.legs.get(rid)
        if (
            leg is not None
            and leg.submit_room is not None
            and any(
                connection.socket is pipe.peer.socket
                for connection in rank.connections  # type: ignore[union-attr]
            )
        ):
            if leg.submit_room == room or room is None:
                world.spared = [each for each in world.spared if each[0] is not leg]
                if attempt >= leg.attempt:  # a rank that is paused looks at both later
                    world.meant.add(leg)
            elif leg not in world.meant:
                world.spared.append((leg, code, world.now))
    if if_unfetched:
        return
    live = controller.part.core.life.requests.get(rid) if controller.alive else None
    if live is not None and code == "fenced" and live.submit.bootstrap_room == room and live.attempt < attempt:
        raise Broken("the newest attempt wins", f"{controller.name} ends {attempt} of {live}", rid)
    for rank in node.part.host.ranks.values():
        if any(connection.socket is pipe.peer.socket for connection in rank.connections):  # type: ignore[union-attr]
            when = max(world.now, node.paused_until)
            world.given_up.setdefault((rank.epoch, rid), []).append((attempt, when))


def _asleep(world: World, node: RankProcess) -> None:
    """What came while it is paused waits until it goes on, also if it is paused again meanwhile."""
    epochs = {rank.epoch for rank in node.part.host.ranks.values()}
    for (epoch, _), given_up in world.given_up.items():
        if epoch in epochs:
            given_up[:] = [
                (attempt, max(when, node.paused_until) if when >= node.paused_since else when)
                for attempt, when in given_up
            ]


# --- ends and rest --------------------------------------------------------------------------------------------------


def end(world: World, asked: Asked) -> None:
    """`ran` says whether a rank may have had it, where nothing went wrong."""
    result = asked.result
    assert result is not None
    dispatched, lived_s = world.dispatched.get(asked.rid), world.now - asked.began
    turned_down = result.code == "too_many" and dispatched is None and asked.spec.prefill_controller < 0
    if asked.spec.rid or (lived_s < 0.1 and not turned_down):
        return
    late = dispatched is not None and dispatched < world.now - 0.05
    never = dispatched is None and (turned_down or lived_s > ANSWERED_S)
    if world.befell:  # then what its controller knows counts, if nothing is wrong between client and controllers
        asks = [f"client-{asked.spec.client}", f"controller-{asked.spec.controller}"]
        if asked.spec.by:
            asks = [asked.spec.by, *(name for name in world.by_name if name.startswith(("client", "controller")))]
        calm = not any(world.felt(name) for name in asks) and asked.spec.prefill_controller < 0
        turned_down = turned_down or (never and _waits(world, asked.rid))
        late, never = False, calm and result.attempts == 1 and turned_down
    if f"{asked.rid}.prefill" in world.dispatched:  # of a pair at two controllers: a rank had that leg
        never = False
    if (late and not result.ran) or (never and result.ran):
        raise Broken("it says whether it ran", f"{asked.rid}: ran {result.ran}, dispatched at {dispatched}", asked.rid)


def _waits(world: World, rid: str) -> bool:
    """Return whether a controller has the request, and has given it to no rank."""
    known = [each.part.core.life.requests.get(rid) for each in world.controllers if each.alive]
    return any(request is not None and not request.dispatched for request in known)


def at_rest(world: World) -> None:
    living = {each.part.core.epoch for each in world.controllers if each.alive}
    for controller in world.controllers:
        core = controller.part.core
        known = core.table._controllers.keys()
        if not known <= living:
            raise Broken("no memory grows", f"{controller.name} knows controllers {known}, there are {living}")
        check(of_controller(core, world.now, complete=False), rest=True)
    once = [asked for asked in world.asked if Counter(each.rid for each in world.asked)[asked.rid] == 1]
    for node in world.nodes:
        if node.alive:
            for rank in node.part.host.ranks.values():
                for asked in once:
                    _history(world, asked, rank, node.part.host.ranks.values())


def _history(world: World, asked: Asked, rank: Any, beside_it: Collection[Any]) -> None:
    """Of one request at one start of a rank: its attempts rise, none begins that was given up, and its client knows
    what was cached. Of a request that was begun again by the same number it may have read the end of the other one,
    which the same process (`beside_it`: its ranks) had."""
    newest: dict[int, tuple[int, float]] = {}  # of each room: the attempt, and until when its rank remembers it
    for record in sorted(rank.core.history.of(asked.rid), key=lambda record: record.taken_at):
        attempt, until = newest.get(record.room, (0, 0.0))
        if record.attempt <= attempt and record.taken_at < until:
            raise Broken("attempts rise", f"{asked.rid} at {rank.instance}/{rank.dp_rank}: {record}", asked.rid)
        newest[record.room] = record.attempt, record.ended_at + REMEMBER_S
        for attempt, when in world.given_up.get((rank.epoch, asked.rid), ()):
            if record.attempt <= attempt and when + AWAKE_S < record.taken_at < when + REMEMBER_S:
                why = f"attempt {attempt} was given up at {when}: {record}"
                raise Broken("what is given up does not begin", f"{asked.rid}: {why}", asked.rid)
        result = asked.result
        if result is None or result.code != "ok" or result.attempts > 1 or record.code != "ok" or result.decode is None:
            continue
        if record.role != "prefill" and (result.decode.epoch, 1) == (rank.epoch, record.attempt):
            said = {0, *(each.cached_tokens for beside in beside_it for each in beside.core.history.of(asked.rid))}
            if result.finish in ("stop", "length") and result.cached_tokens not in said:
                raise Broken("its client knows what was cached", f"{result}: {record}", asked.rid)
            if not world.befell and result.cached_tokens != record.cached_tokens:
                raise Broken("its client knows what was cached", f"{result}: {record}", asked.rid)
