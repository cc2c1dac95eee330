"""The door that SGLang comes in by: `load`, called once in each of its processes. Costs nothing while it is off."""

from __future__ import annotations

import os


def load() -> None:
    """The entry point of the group `sglang.srt.plugins`."""
    if os.environ.get("PDBUS_SGLANG") or os.environ.get("PDBUS_SGLANG_METHOD"):
        from pdbus.sglang.hooking import hook

        hook(os.environ)
