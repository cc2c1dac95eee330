"""What docs/security.md says is enforced."""

from __future__ import annotations

from cuts import Cut, Uncut

CUTS: tuple[Cut | Uncut, ...] = ()  # fmt: skip
