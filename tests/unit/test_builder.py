"""The build backend: which modules it compiles, and that a wheel comes of it wherever it runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pdbus_build
import pytest
from setuptools import Extension, build_meta

ROOT = Path(__file__).parents[2]
CORES = [Extension("core", [])]


class Builds:
    """What setuptools was asked to build; it fails with extensions where no compiler works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
        self.compiles = True
        self.built: list[list[Extension]] = []
        monkeypatch.chdir(place)
        monkeypatch.delenv("PDBUS_PURE", raising=False)
        monkeypatch.setattr(build_meta, "build_wheel", self.build)
        monkeypatch.setattr(pdbus_build, "_cores", lambda place: CORES)

    def build(self, *arguments: object) -> str:
        if pdbus_build.extensions and not self.compiles:
            raise SystemExit("error: command 'gcc' failed: No such file or directory")
        self.built.append(list(pdbus_build.extensions))
        return "a.whl"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builds:
    return Builds(monkeypatch, tmp_path)


def test_a_wheel_has_compiled_cores(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    assert pdbus_build.build_wheel("dist") == "a.whl"
    assert builds.built == [CORES]
    assert not pdbus_build.extensions
    assert not capsys.readouterr().err


def test_without_a_compiler_the_wheel_is_pure_with_one_warning(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    builds.compiles = False
    assert pdbus_build.build_wheel("dist") == "a.whl"
    assert builds.built == [[]]
    (said,) = capsys.readouterr().err.splitlines()
    assert "pure Python" in said
    assert "gcc" in said


def test_without_mypyc_the_wheel_is_pure(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(place: Path) -> list[Extension]:
        raise ModuleNotFoundError("No module named 'mypyc'")

    monkeypatch.setattr(pdbus_build, "_cores", missing)
    assert pdbus_build.build_wheel("dist") == "a.whl"
    assert builds.built == [[]]


def test_a_pure_wheel_can_be_asked_for(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(pdbus_build.REQUIRES) <= set(pdbus_build.get_requires_for_build_wheel())
    monkeypatch.setenv("PDBUS_PURE", "1")
    assert not set(pdbus_build.REQUIRES) & set(pdbus_build.get_requires_for_build_wheel())
    pdbus_build.build_wheel("dist")
    assert builds.built == [[]]
    (said,) = capsys.readouterr().err.splitlines()
    assert "PDBUS_PURE" in said


def test_nothing_of_a_build_is_left_behind(builds: Builds, tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "somebody's").touch()
    pdbus_build.build_wheel("dist")
    assert [path.name for path in tmp_path.rglob("*")] == ["build", "somebody's"]


def test_editable_installs_and_sdists_are_as_setuptools_makes_them() -> None:
    for hook in ("build_editable", "build_sdist", "get_requires_for_build_editable"):
        assert getattr(pdbus_build, hook) == getattr(build_meta, hook)


@pytest.mark.parametrize("module", pdbus_build.MODULES)
def test_what_is_compiled_defines_no_struct(module: str) -> None:
    """mypyc makes one whose class arguments (`frozen`, `gc`, `tag`) are lost, without a word."""
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            assert "Struct" not in {base.id for base in node.bases if isinstance(base, ast.Name)}, node.name


def test_what_users_extend_is_not_compiled() -> None:
    """Python can't derive from a compiled class."""
    extended = ("bus/runtime/service.py", "controller/policies/base.py", "controller/policies/methods.py")
    assert not set(extended) & set(pdbus_build.MODULES)
