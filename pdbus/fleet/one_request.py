"""One request as a page shows it, in the words of `pdbus trace`: what became of it, its steps with their times, and why
its legs (a leg is one rank's share of it) went to their ranks. Pure.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from bus.wire.messages import TraceReply
from pdbus.trace.hops import NO_REASONS, attempts_of, hops_of, notes_of, reasons_of, title_of, unknown, words_of

RID_MAX = 128


def as_page(rid: str, answer: TraceReply) -> dict[str, Any]:
    """Return the request for JSON; `rid` is what was asked for. Where no part knows it, there is a sentence alone."""
    if not answer.parts:
        return {"sentence": unknown(rid, answer)}
    hops = hops_of(answer)
    attempts = attempts_of(hops)
    return {
        "rid": answer.rid or rid,
        "title": title_of(rid, answer, hops),
        "marks": [
            {
                "at_s": round(hop.at_s, 6), "took_s": None if hop.took_s is None else round(hop.took_s, 6),
                "part": hop.part, "leg": "client" if hop.part == "client" else hop.event.leg or "",
                "words": "".join(words_of(hop, attempts)), "bad": hop.bad,
            }
            for hop in hops
        ],
        "why": [{"title": each.title, "sentences": each.sentences} for each in reasons_of(answer)],
        "no_reasons": NO_REASONS,
        "notes": notes_of(replace(answer, others=())),  # which the page shows as buttons
        "others": list(answer.others),
    }  # fmt: skip
