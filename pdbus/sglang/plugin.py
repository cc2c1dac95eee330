"""The entry point `load`, which SGLang calls once in each of its processes. It costs nothing while the plugin is
off."""

from __future__ import annotations

import os


def load() -> None:
    """Load the plugin into this process if it is on: the entry point of the group `sglang.srt.plugins`. It raises
    nothing of ours."""
    if os.environ.get("PDBUS_SGLANG") or os.environ.get("PDBUS_SGLANG_METHOD"):
        from pdbus.sglang.hooking import hook

        hook(os.environ)
