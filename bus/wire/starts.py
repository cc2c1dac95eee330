"""The rule by which one of two starts of a rank has its place, for broker and controllers."""

from __future__ import annotations

from bus.wire.messages import Hello, Member


def is_later(one: Hello | Member, other: Hello | Member) -> bool:
    """Return true if `one` is known to have begun after `other`: both say when they began."""
    known = one.started_us and other.started_us
    return bool(known and (one.started_us, one.epoch) > (other.started_us, other.epoch))
