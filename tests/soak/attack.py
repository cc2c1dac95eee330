"""`python attack.py ATTACK`: one attack on the endpoints that stdin gives as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from soak.attacks import ATTACKS

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](json.load(sys.stdin))
