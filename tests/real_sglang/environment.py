"""An environment with real SGLang for these tests, made once for each set of pins, outside the tree.

    python3 tests/real_sglang/environment.py          # prints its Python; the first time takes some minutes and 4 GB

What is not as SGLang ships it: torch is a CPU build (SGLang pins one for CUDA), what only a GPU or media need is left
out or stands in (`stand_ins.py`), and the libraries that Mooncake links to lie beside the environment, unpacked from
the system's packages, where the system has not installed them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from engine_venv import python_of  # noqa: E402

STAND_INS = HERE / "stand_ins.py"
LIBRARIES = {  # what Mooncake links to, and the package of each in Debian and Ubuntu
    "ibverbs": "libibverbs1", "mlx5": "ibverbs-providers", "nl-3": "libnl-3-200", "nl-route-3": "libnl-route-3-200",
    "numa": "libnuma1", "curl": "libcurl4",
}  # fmt: skip


def finish(place: Path) -> None:
    """What pip can't do: the stand-ins, and Mooncake's libraries in `place`/libraries."""
    (site,) = place.glob("lib/python3*/site-packages")
    shutil.copy(STAND_INS, site / "pdbus_stand_ins.py")
    (site / "pdbus_stand_ins.pth").write_text("import pdbus_stand_ins\n")
    packages = [package for name, package in LIBRARIES.items() if find_library(name) is None]
    if not packages:
        return
    if shutil.which("apt-get") is None:
        sys.exit(f"Mooncake needs the libraries of {', '.join(packages)}: install them, then run this again")
    debs = place / "debs"
    debs.mkdir(exist_ok=True)
    fetch = ["apt-get", "download", "-qq", *packages]
    if subprocess.run(fetch, cwd=debs, stdout=sys.stderr, check=False).returncode:
        subprocess.run(["apt-get", "update", "-qq"], stdout=sys.stderr, check=False)
        subprocess.run(fetch, cwd=debs, check=True, stdout=sys.stderr)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(place / "unpacked")], check=True)
    libraries = place / "libraries"
    libraries.mkdir(exist_ok=True)
    for library in (place / "unpacked").rglob("*.so*"):
        if not (libraries / library.name).exists():
            (libraries / library.name).symlink_to(library)


if __name__ == "__main__":
    print(python_of("sglang", "real SGLang", HERE / "pins.txt", STAND_INS, finish=finish))
