"""An environment with kubectl and kubernetes-validate, made once for each set of pins, outside the tree.

python3 tests/kubernetes/environment.py            # prints its Python
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from engine_venv import python_of  # noqa: E402

if __name__ == "__main__":
    print(python_of("kubernetes", "kubectl and kubernetes-validate", HERE / "pins.txt", takes="a minute, 150 MB"))
