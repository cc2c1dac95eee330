"""An environment with Ray for these tests, made once for each set of pins, outside the tree.

python3 tests/real_ray/environment.py            # prints its Python; the first time takes a minute and 300 MB
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from engine_venv import python_of  # noqa: E402

if __name__ == "__main__":
    print(python_of("ray", "Ray", HERE / "pins.txt", takes="a minute, 300 MB"))
