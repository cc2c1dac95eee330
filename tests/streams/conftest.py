"""The plugin's folder is on the path of what is tapped; here it is for its registry, and taps nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "plugin")]
