"""What the distribution owns, and what importing its parts costs."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bus.runtime.spans import OTEL_EXTRA
from nodes.own.engines.needs import NUMPY_EXTRA, TORCH_EXTRA

ROOT = Path(__file__).parents[2]
PACKAGES = ("bus", "nodes", "controller", "pdbus")


distributions = cache(importlib.metadata.packages_distributions)


@cache
def imports_of(path: Path) -> list[set[str]]:
    """What each import in the file names, without what follows a dot."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found += [{name.split(".")[0] for name in names}] if names else []
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_ours_alone(package: str) -> None:
    """Another distribution with a top-level `bus` would shadow ours without a word."""
    owners = distributions().get(package, [])
    assert set(owners) <= {"pdbus"}, f"{package} also belongs to {owners}"
    # An editable install lists no files, so look at what is imported as well.
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / package / "__init__.py"


def test_the_distribution_is_installed_with_its_command() -> None:
    distribution = importlib.metadata.distribution("pdbus")
    entry_points = {entry.name: entry.value for entry in distribution.entry_points}
    assert entry_points["pdbus"]
    assert {entry.group for entry in distribution.entry_points} == {
        "console_scripts", "pytest11", "sglang.srt.plugins", "vllm.general_plugins",
    }  # fmt: skip


def test_what_a_user_is_told_to_install_is_what_the_extra_has() -> None:
    """By the packages' names: no index need have pdbus itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert " ".join(["pip install", *(re.split("[<>=~!]", need)[0] for need in extras["torch"])]) == TORCH_EXTRA
    assert " ".join(["pip install", *(re.split("[<>=~!]", need)[0] for need in extras["numpy"])]) == NUMPY_EXTRA
    assert " ".join(["pip install", *(re.split("[<>=~!]", need)[0] for need in extras["otel"])]) == OTEL_EXTRA
    told = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "pdbus[" in path.read_text()]
    assert not told, "names an index that has no pdbus"


@pytest.mark.parametrize("package", ["bus", "controller"])
def test_control_plane_imports_no_torch(package: str) -> None:
    code = (
        f"import sys, pkgutil, importlib, {package} as top\n"
        "for each in pkgutil.walk_packages(top.__path__, top.__name__ + '.'):\n"
        "    each.name.endswith('__main__') or importlib.import_module(each.name)\n"
        "heavy = {'torch', 'numpy', 'nodes', 'tokenizers', 'gguf', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "only_in"),
    [("msgpack", ["bus/wire/codec.py"]), ("pickle", []), ("marshal", [])],
)
def test_one_codec_and_no_pickle(module: str, only_in: list[str]) -> None:
    importers = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if module in path.read_text(encoding="utf-8"):  # others are not parsed
                importers += [str(path.relative_to(ROOT)) for names in imports_of(path) if module in names]
    assert importers == only_in


def versions(text: str) -> dict[str, str]:
    """By package, of lines as `name==version ...`."""
    return {canonicalize_name(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}


def needed(name: str, extra: str = "") -> set[str]:
    """What a package that is installed here needs here."""
    wants = map(Requirement, importlib.metadata.requires(name) or [])
    return {
        canonicalize_name(each.name) for each in wants if each.marker is None or each.marker.evaluate({"extra": extra})
    }


@pytest.mark.parametrize(
    ("file", "wanted"), [("image.txt", needed("pdbus", "serve")), ("image_build.txt", {"setuptools", "mypy"})],
    ids=["what it has", "what builds it"],
)  # fmt: skip
def test_the_image_takes_packages_by_their_hashes_in_the_versions_that_are_tested(file: str, wanted: set[str]) -> None:
    """And all that they need: pip takes none without a hash where one has some."""
    text = (ROOT / "builder" / file).read_text(encoding="utf-8")
    locked = versions(text)
    lines = text.replace("\\\n", " ").splitlines()[1:]
    assert all(re.fullmatch(r"\S+==\S+(\s+--hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    assert locked.items() <= versions((ROOT / "constraints.txt").read_text(encoding="utf-8")).items()
    for found in locked:
        wanted = wanted | needed(found)
    assert wanted <= locked.keys(), "python builder/image_lock.py"
