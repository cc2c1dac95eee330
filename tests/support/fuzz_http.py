"""Requests of every kind to an edge, made by schemathesis from its own OpenAPI document: what the document allows, and
what it does not. `make fuzz-http`.

Every answer must be one that the document names, never a 500; what breaks the document must be refused, and so must a
method that a path has not. What the document allows may be refused: it does not say which fields go together.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from edge_process import get, url, wait
from up_process import Up

# Without a deadline of its own a request might be given one that passes at once: a 504, and rightly so.
FIXED = (
    "-H", "x-request-deadline-s: 30", "--exclude-checks", "positive_data_acceptance", "--request-timeout", "60",
    "--phases", "coverage,fuzzing", "-w", "2", "--no-color",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--schemathesis", type=Path, required=True, help="the command")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = () if asked.seed is None else ("--seed", str(asked.seed))
    with tempfile.TemporaryDirectory(prefix="pd") as path, Up(Path(path), "--model", "sim", "--http", "0") as up:
        base = url(up)
        wait(lambda: get(base, "/ready")[0] == 200)
        document = json.loads(get(base, "/openapi.json")[1])
        for schema in document["components"]["schemas"].values():
            if "model" in schema.get("properties", {}):
                schema["properties"]["model"] = {"enum": ["sim", ""]}  # any other name is a 404, and the end
        (Path(path) / "openapi.json").write_text(json.dumps(document))
        line = [asked.schemathesis.absolute(), "run", "openapi.json", "-u", base, *FIXED, *seed]
        code = subprocess.run([*line, "--max-time", str(asked.seconds)], cwd=path).returncode
        wait(lambda: get(base, "/ready")[0] == 200)
        return code


if __name__ == "__main__":
    sys.exit(main())
