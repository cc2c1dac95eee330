"""These tests need SGLang: `make test-sglang` and `make test-sglang-servers` run them in an environment that has it.

No other run sees them.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
