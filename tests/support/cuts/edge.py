"""The limits of docs/edge.md."""

from __future__ import annotations

from cuts import Cut, Uncut

CUTS: tuple[Cut | Uncut, ...] = ()  # fmt: skip
