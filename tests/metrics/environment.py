"""Debian's prometheus and promtool, unpacked once for each pin, outside the tree and without root.

python3 tests/metrics/environment.py            # prints the folder that has both programs

apt gets the package and checks it against Debian's signed index, with lists of its own where this machine has none; the
pinned one must have the pinned SHA-256, too. Where it can't be had, programs of the pinned version on PATH serve.
"""

from __future__ import annotations

import fcntl
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))

from engine_venv import cache_root  # noqa: E402

PINS = HERE / "pins.txt"
PROGRAMS = ("prometheus", "promtool")
APT_S = 120.0


class Unavailable(Exception):
    """Why there is none, in one line that says what to do."""


def pin(text: str) -> tuple[str, str, str]:
    """(Debian's version, architecture, SHA-256) of `text`, the file of pins."""
    (line,) = [line for line in text.splitlines() if line and not line.startswith("#")]
    version, architecture, digest = line.split()
    return version, architecture, digest


def upstream(version: str) -> str:
    """`2.42.0` of `2.42.0+ds-5+deb12u1`."""
    return re.split(r"[+~-]", version, maxsplit=1)[0]


def members(archive: bytes) -> dict[str, bytes]:
    """What is in an `ar` archive, as a .deb is one, by name. Unavailable for anything else."""
    if not archive.startswith(b"!<arch>\n"):
        raise Unavailable("what apt got is no Debian package")
    found, at = {}, 8
    while at + 60 <= len(archive):
        name, size = archive[at : at + 16].decode().strip().rstrip("/"), int(archive[at + 48 : at + 58])
        found[name] = archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return found


def unpack(package: bytes, place: Path) -> None:
    """Write the programs alone of a .deb to `place`."""
    inside = members(package)
    if "data.tar.xz" not in inside:
        raise Unavailable(f"the package has {', '.join(inside)}, and no data.tar.xz")
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(inside["data.tar.xz"]))) as tar:
        for name in PROGRAMS:
            program = tar.extractfile(f"./usr/bin/{name}")
            assert program is not None, name
            (place / name).write_bytes(program.read())
            (place / name).chmod(0o755)


def judged(package: bytes, name: str, wanted: tuple[str, str, str]) -> None:
    """Unavailable where the package is the pinned one by its file's `name` and has another SHA-256."""
    version, architecture, digest = wanted
    got = sha256(package).hexdigest()
    if f"_{version}_{architecture}." in name.replace("%3a", ":") and got != digest:
        raise Unavailable(f"{name} has the SHA-256 {got}, and tests/metrics/pins.txt says {digest}")


def apt(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    line = ["apt-get", "-qq", "-o", "APT::Sandbox::User=", *command]
    return subprocess.run(line, cwd=place, capture_output=True, text=True, check=False, timeout=APT_S)


def download(place: Path, wanted: tuple[str, str, str]) -> bytes:
    """The package, by apt: another revision of the same prometheus where Debian no longer has the pinned one."""
    state, cache = place / "state", place / "cache"
    (state / "lists" / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    own = ("-o", f"Dir::State={state}", "-o", f"Dir::State::status={place / 'status'}", "-o", f"Dir::Cache={cache}")
    (place / "status").touch()
    why = ""
    for lists in ((), own):
        if lists and (done := apt(place, *lists, "update")).returncode:
            why = done.stderr
            continue
        for version in (wanted[0], f"{upstream(wanted[0])}*"):
            done = apt(place, *lists, "download", f"prometheus={version}")
            for package in sorted(place.glob("prometheus_*.deb")) if not done.returncode else ():
                content = package.read_bytes()
                judged(content, package.name, wanted)
                if version != wanted[0]:
                    print(f"==> Debian has {package.name} now: raise the pin in {PINS}", file=sys.stderr)
                return content
            why = done.stderr
    raise Unavailable(f"apt has no prometheus {wanted[0]} ({' '.join(why.split()) or 'it did not say why'})")


def on_path(wanted: tuple[str, str, str]) -> Path | None:
    """The folder on PATH that has both programs in the pinned version."""
    found = shutil.which("prometheus")
    if found is None or not (Path(found).parent / "promtool").exists():
        return None
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=APT_S)
    version = upstream(wanted[0])
    return Path(found).parent if re.search(rf"version {re.escape(version)}\b", said.stdout + said.stderr) else None


def programs() -> Path:
    """The folder that has both, made first if it is not there. Unavailable with what to do where it can't be had."""
    text = PINS.read_bytes()
    wanted = pin(text.decode())
    place = cache_root() / f"prometheus-{sha256(text + os.uname().machine.encode()).hexdigest()[:12]}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes meanwhile waits
        if (place / "ready").exists():
            return place
        print(f"==> Debian's prometheus {wanted[0]} in {place} (once; seconds, 100 MB)", file=sys.stderr, flush=True)
        shutil.rmtree(place, ignore_errors=True)
        (place / "apt").mkdir(parents=True)
        try:
            unpack(download(place / "apt", wanted), place)
        except (Unavailable, OSError, subprocess.TimeoutExpired) as error:
            shutil.rmtree(place, ignore_errors=True)
            if here := on_path(wanted):
                return here
            raise Unavailable(
                f"{error}: elsewhere than on Debian 12 put prometheus and promtool {upstream(wanted[0])} of "
                "https://prometheus.io/download on PATH"
            ) from None
        shutil.rmtree(place / "apt", ignore_errors=True)
        (place / "ready").touch()
        return place


if __name__ == "__main__":
    try:
        print(programs())
    except Unavailable as error:
        sys.exit(f"test-metrics: {error}")
