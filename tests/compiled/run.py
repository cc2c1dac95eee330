"""The tests of the compiled cores, against compiled cores: `make test-compiled`.

The wheel is built, or taken from `dist` where `make dist` built it of the same sources, and installed into an
environment of its own, outside the tree, once for each state of the sources.
What tests a compiled module runs there, from a folder that has the tests and not the sources.
"""

from __future__ import annotations

import ast
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "builder")]

from engine_venv import cache_root  # noqa: E402
from pdbus_build import MODULES  # noqa: E402

PACKAGES = ("bus", "controller", "nodes", "pdbus")
BESIDE = ("tests", "benchmarks", "docs", "examples", "builder", "pyproject.toml", "README.md")  # what tests read
DIST = ROOT / "dist"
BUILT_OF = DIST / ".sources"  # what `state` was when `make dist` built the wheel there
KEPT = 3  # environments of other states of the sources


def sources() -> Iterator[Path]:
    """All that goes into the wheel, or makes it."""
    for folder in (*PACKAGES, "builder"):
        yield from sorted(path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc" and path.is_file())
    yield from (ROOT / name for name in ("pyproject.toml", "setup.py", "constraints.txt"))


def state() -> str:
    """Of the sources and the Python that builds a wheel of them: two that differ in anything have two."""
    key = sha256(f"{sys.version} {sys.prefix}".encode())  # what this one has is found in its own place
    for path in sources():
        key.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return key.hexdigest()


def environment() -> Path:
    """The Python of an environment with the compiled wheel and, beside it, all that this one has."""
    place = cache_root() / f"compiled-{state()[:12]}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / "compiled.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes meanwhile waits
        if not (place / "ready").exists():
            print(f"==> compiling the cores into {place} (a minute or two)", file=sys.stderr, flush=True)
            _make(place)
        (place / "ready").touch()
        others = [path.parent for path in place.parent.glob("compiled-*/ready") if path.parent != place]
        for old in sorted(others, key=lambda path: (path / "ready").stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old)
    return place / "bin" / "python"


def _make(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = place / "bin" / "python"
    wheel = _wheel(place / "dist")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True,
        check=True,
    ).stdout.strip()  # fmt: skip
    # A folder that a .pth file names has its own .pth files left alone: the checkout is not found through them.
    Path(site, "what_the_tests_need.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _wheel(out: Path) -> Path:
    """The wheel of these sources; one that has to be built comes into `out`."""
    said = ""
    if BUILT_OF.exists() and BUILT_OF.read_text() == state():
        out = DIST
    else:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT)]
        built = subprocess.run(build, capture_output=True, text=True, check=False)
        said = f"{built.stdout}{built.stderr}"
    wheels = list(out.glob("*.whl"))
    if not wheels or wheels[0].name.endswith("-none-any.whl"):
        sys.exit(f"the cores could not be compiled:\n{said}")
    return wheels[0]


def imported(path: Path) -> set[str]:
    """The modules that `path` names, and where it takes names from a package those names as modules too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def chosen() -> list[str]:
    """The unit and property tests that import a compiled module, themselves or by what supports them."""
    compiled = {path.removesuffix(".py").replace("/", ".") for path in MODULES}
    support = {path.stem: path for path in (ROOT / "tests" / "support").glob("*.py")}
    support |= {path.stem: path for path in (ROOT / "tests" / "property").glob("*.py")}

    def concerned(path: Path, seen: set[str]) -> bool:
        names = imported(path)
        following = names & support.keys() - seen
        return bool(names & compiled) or any(concerned(support[name], seen | following) for name in following)

    tests = [path for kind in ("unit", "property") for path in sorted((ROOT / "tests" / kind).glob("test_*.py"))]
    own = sorted((ROOT / "tests" / "compiled").glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in (*own, *tests) if path in own or concerned(path, set())]


def main() -> int:
    if sys.argv[1:] == ["--built"]:  # by `make dist`
        BUILT_OF.write_text(state())
        return 0
    python = environment()
    with tempfile.TemporaryDirectory(prefix="pdc") as made:
        place = Path(made)
        for name in BESIDE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, place)
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        pytest = [str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal"]
        return subprocess.run([*pytest, *sys.argv[1:], *chosen()], cwd=place, env=clean, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
