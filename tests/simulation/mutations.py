# ruff: noqa: E501
"""Defects that were found by other means, each put back by a change of one text in a symbol: the simulation has to find
them. `make simulate-mutations` runs each until it breaks, for at most `--cpu-s` seconds of CPU.

Who renames a symbol keeps its line: `test_mutations.py` checks that each still fits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import cuts

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """In the source of `symbol` `old` becomes `new`; `defect` is what users saw of it."""

    name: str
    defect: str
    symbol: str
    old: str
    new: str


MUTATIONS = (
    Mutation("rid-of-another", "a request gets the tokens of a former one of its rid",
             "nodes.link.leg:Identity.agrees", "return all(", "return True or all("),
    Mutation("rid-of-another-cancels", "a cancel of a former request of the rid ends this one",
             "nodes.link.core:RankCore.cancel", "if leg is not None and not leg.identity.agrees(", "if False and not leg.identity.agrees("),
    Mutation("two-halves", "two halves of different answers, with code ok",
             "pdbus.client.core:ClientCore._accepted",
             "if len(request.ids) > request.offset and (attempt,", "if False and (attempt,"),
    Mutation("poison-by-resets", "requests are poison though no rank has died",
             "controller.requests.losses:Losses.lost", "if loss.died:\n                request.losses", "if True:\n                request.losses"),
    Mutation("resets-lose-work", "what ended during a reset is never told",
             "nodes.link.rank:LinkedRank.welcomed", "if again:", "if False:"),
    Mutation("doubts-for-ever", "what a rank lost with its connection is waited for without an end",
             "controller.members:Members.hello", "if work:\n", "if False:\n"),
    Mutation("phantom-load", "load at other controllers that never goes away",
             "controller.load.table:LoadTable.counters", "rank.sent + rank.skew)", "rank.sent)"),
    Mutation("orphans", "legs go on though nobody wants them",
             "controller.requests.losses:Losses.returned", "self.unclear.orphans(running)", "()"),
    Mutation("untold-cancels", "a cancel that met a dead connection is forgotten",
             "controller.requests.losses:Losses.untold", "if not cancel.if_unfetched:", "if False:"),
    Mutation("older-adopted", "after a restart an older attempt wins",
             "controller.requests.attempts:Attempts._adopt", "attempt = max([", "attempt = min(["),
    Mutation("lanes-starve", "a request waits beside a rank that would take it",
             "controller.core:ControllerCore.handle", "self.life.drain(now, out)", "pass"),
    Mutation("undelivered-counts", "a dispatch that never left counts as load for ever",
             "controller.load.table:LoadTable.undo", "rank.sent -= 1", "rank.sent -= 0"),
    Mutation("skew-forgotten", "what a connection lost is in flight for ever",
             "controller.load.table:LoadTable.reconnected", "rank.rebase = True", "rank.rebase = False"),
    Mutation("attempts-not-fenced", "the rank that was given up streams into the next attempt",
             "pdbus.client.core:ClientCore._tokens", "or message.attempt != request.attached", ""),
    Mutation("resume-from-zero", "a resumed request repeats its first tokens",
             "pdbus.client.core:ClientCore._submit", "request.offset = len(request.ids)", "request.offset = 0"),
    Mutation("gap-not-asked", "tokens that were lost are skipped",
             "pdbus.client.core:ClientCore._tokens", "if message.start > have:", "if False:"),
    Mutation("submits-not-repeated", "a submit that is lost is never answered",
             "pdbus.client.core:ClientCore._resend", "if not unanswered or now < request.resend_at:", "if True:"),
    Mutation("verdict-awaited", "a stream that failed is waited for without an end",
             "pdbus.client.core:ClientCore._tokens", "request.due_at = now + VERDICT_S", "request.due_at = now + 1e9"),
    Mutation("other-leg-runs-on", "one leg ends, the other is not told",
             "controller.requests.attempts:Attempts.withdraw", "self.cancel(request, code, out)", "pass"),
    Mutation("ends-not-remembered", "an attempt that comes again after its end runs again",
             "nodes.link.reports:Reports.answered", "if known is not None and known.attempt == dispatch.attempt:", "if False:"),
    Mutation("late-dispatch-runs", "an attempt older than one that was here runs",
             "nodes.link.reports:Reports.check_newest", "if max(", "if False and max("),
    Mutation("cancel-before-dispatch", "a cancel that overtakes its dispatch is forgotten",
             "nodes.link.core:RankCore.cancel", "self.reports.remember(owner, Ended(cancel.rid", "(owner, Ended(cancel.rid"),
    Mutation("acks-of-refused", "a dispatch that a rank refuses is in flight for ever",
             "nodes.link.core:RankCore.ingest", "counted = self.reports.acknowledge(dispatch)",
             'counted = self.reports.acknowledge(dispatch) if not self.draining else "counted"'),
    Mutation("unread-for-ever", "what a client that has gone asked for runs and is held on",
             "nodes.link.host:Host._slow_tick", "self.ranks[leg.dp_rank].unread(leg)", "pass"),
    Mutation("kv-never-freed", "a prefill rank holds a KV cache that nobody fetches",
             "nodes.link.core:RankCore.tick", "for leg in lost:", "for leg in ():"),
    Mutation("kv-done-lost", "a prefill rank holds a KV cache that was fetched",
             "nodes.link.core:RankCore.pulled", "leg = self.sender.done(peer, message)", "leg = None"),
    Mutation("damaged-kv", "a block that is missing is computed with",
             "nodes.own.receiver:KvReceiver.received", "if not intact", "if False"),
    Mutation("restart-is-not-seen", "what ran at a start that another has replaced is waited for",
             "controller.members:Members.hello", "losses.append(Loss(rank, f\"rank {key[0]}/{key[1]} was restarted\"))", "pass"),
    Mutation("twice-at-once", "two starts of a rank both serve",
             "controller.members:Members.hello", "if known and not _is_later(rank.info, hello):", "if False:"),
    Mutation("tries-not-counted", "cancelled or fenced by what became of tries that its client did not make",
             "controller.requests.table:RequestTable.add", "if not same or submit.attempt > said:", "if not same:"),
    Mutation("late-cancels", "the cancel of a request that was given up ends another client's",
             "controller.requests.life:Life.cancel", "room is None or", "True or"),
    Mutation("cancels-of-the-ended", "a stream that has ended cancels the next request of its rid",
             "pdbus.client.traffic:Traffic.cancel", "if sink is None or self._sinks.get(rid) == sink:", "if True:"),
    Mutation("watch-for-ever", "who waits for a room that ended waits on",
             "nodes.link.rank:LinkedRank._do", "host.publish(self.publisher.drop(action.room, action.attempt, action.code, now))", "pass"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutations; none: all")
    parser.add_argument("--cpu-s", type=float, default=120.0)
    options = parser.parse_args()
    missed = []
    for each in MUTATIONS:
        if options.names and each.name not in options.names:
            continue
        began = time.monotonic()
        code = (
            f"import cuts, sys; cuts.cut_hook.install({each.symbol!r}, {each.old!r}, {each.new!r}); "
            f"from simulation.run import main; sys.argv[1:] = ['0:100000', '--first', '--cpu-s', '{options.cpu_s}']; main()"
        )
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )  # fmt: skip
        found = next((line for line in ran.stdout.splitlines() if line.startswith("seed ")), "")
        print(
            f"{each.name}: {found[:200] or 'NOT FOUND ' + (ran.stdout + ran.stderr)[-300:]} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
        if not found:
            missed.append(each.name)
    print(f"{len(missed)} not found: {', '.join(missed)}" if missed else "all found")
    sys.exit(bool(missed))


assert cuts.cut_hook is not None

if __name__ == "__main__":
    main()
