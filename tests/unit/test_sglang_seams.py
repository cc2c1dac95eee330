"""What is compared before anything of SGLang is hooked, against its recorded signatures; there is no SGLang here."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sglang_skeleton import RECORDED, write

from pdbus.sglang import seams

ROOT = Path(__file__).parents[2]
ALL = {seam.target: seam for seam in (*seams.HOOKS, *seams.CALLS)}
FIELDS = [(record, field) for record in seams.RECORDS for field in record.fields]

# A SGLang of which only the plugin door works: its registry says what is hooked in place of doing it.
REGISTRY = """
from enum import Enum

class HookType(Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"

class HookRegistry:
    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        print("hooked", target, hook_type.value, callable(hook), flush=True)
"""
RESOLUTION = """
def register_resolution_hook(name):
    def register(function):
        print("hooked", name, "step", callable(function), flush=True)
    return register
"""


@pytest.fixture
def srt(tmp_path: Path) -> Path:
    root = tmp_path / "sglang" / "srt"
    write(RECORDED.read_text(), root)
    return root


# --- the tables -------------------------------------------------------------------------------------------------------


def test_the_tables_fit_what_was_recorded_of_the_tested_version(srt: Path) -> None:
    assert list(seams.mismatches(srt)) == []
    assert re.search(r"_(\d+_\d+_\d+)\.txt$", str(RECORDED)).group(1).replace("_", ".") in seams.TESTED  # type: ignore[union-attr]


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("change", ["gone", "one more", "another name"])
def test_a_seam_that_changed_is_seen(srt: Path, target: str, change: str) -> None:
    seam = ALL[target]
    path = srt / Path(*seam.module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    name = seam.name.rpartition(".")[2]
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]:
        if change == "gone":
            node.name = "other"
        elif change == "one more":
            node.args.kwonlyargs.append(ast.arg("more"))
            node.args.kw_defaults.append(None)
        else:
            node.args.args = [ast.arg(f"not_{each.arg}") for each in node.args.args] or [ast.arg("more")]
    path.write_text(ast.unparse(tree))
    (line,) = seams.mismatches(srt)
    assert target in line


@pytest.mark.parametrize(("record", "field"), FIELDS)
def test_a_field_that_is_gone_is_seen(srt: Path, record: seams.Record, field: str) -> None:
    path = srt / Path(*record.module.split(".")).with_suffix(".py")
    before, after = path.read_text().split(f"class {record.name}:")
    path.write_text(f"{before}class {record.name}:{re.sub(f'    {field}: object', '    pass', after, count=1)}")
    (line,) = seams.mismatches(srt)
    assert f"{record.name} has no {field}" in line


def test_a_module_that_is_gone_or_broken_is_seen(srt: Path) -> None:
    (srt / "managers" / "utils.py").unlink()
    (srt / "runtime_context.py").write_text("def get_parallel(:")
    lines = list(seams.mismatches(srt))
    assert any("is_health_check_generate_req is not there" in line for line in lines)
    assert any("get_parallel is not there" in line for line in lines)


# --- the door ---------------------------------------------------------------------------------------------------------


def door(srt: Path, *imported: str, **environ: str) -> tuple[list[str], str]:
    """Load the plugin as SGLang does, in a process that has imported these modules of it: what was hooked, and what
    else was said."""
    (srt.parent / "__init__.py").touch()
    for folder in {path.parent for path in srt.rglob("*.py")} | {srt}:
        (folder / "__init__.py").touch()
    (srt / "plugins" / "hook_registry.py").write_text(REGISTRY)
    (srt / "arg_groups" / "resolution_hooks.py").write_text(RESOLUTION)
    info = srt.parent.parent / "sglang-0.5.23.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    code = "".join(f"import sglang.srt.{module}\n" for module in imported) + textwrap.dedent(
        """
        import sys
        from pdbus.sglang.plugin import load
        before = set(sys.modules)
        load()
        if "--cost" in sys.argv:
            print("imported", len(set(sys.modules) - before), flush=True)
        """
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PDBUS_", "SGLANG_"))}
    path = os.pathsep.join([str(srt.parent.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code, "--cost"], env=clean | {"PYTHONPATH": path} | environ, text=True, timeout=60,
        capture_output=True, check=True,
    )  # fmt: skip
    return [line.removeprefix("hooked ") for line in done.stdout.splitlines() if line.startswith("hooked")], (
        done.stdout + done.stderr
    )


def test_without_a_variable_it_is_not_even_imported(srt: Path) -> None:
    hooked, said = door(srt)
    assert hooked == []
    assert "imported 0" in said


SCHEDULER = tuple(sorted({seam.module for seam in seams.HOOKS} - {"managers.disagg_service"}))


def test_one_variable_hooks_every_seam_of_what_the_process_has_imported(srt: Path) -> None:
    hooked, _ = door(srt, *SCHEDULER, PDBUS_SGLANG_METHOD="cache_aware")
    assert hooked == [
        *(f"{seam.target} {seam.kind} True" for seam in seams.HOOKS), "handle_load_balance_method step True",
    ]  # fmt: skip
    hooked, _ = door(srt, PDBUS_SGLANG="on")
    assert hooked == [
        "sglang.srt.managers.disagg_service.start_disagg_service around True", "handle_load_balance_method step True",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER goes other ways"),
        ({"PDBUS_SGLANG_METHOD": "total_tokns"}, "did you mean total_tokens?"),
        ({"PDBUS_SGLANG_BUS": "10.0.0.1"}, "an address starts with"),
    ],
)
def test_what_cannot_be_is_one_line_and_hooks_nothing(srt: Path, environ: dict[str, str], says: str) -> None:
    hooked, said = door(srt, **({"PDBUS_SGLANG": "on"} | environ))
    assert hooked == []
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "pdbus.plugin.off" in line]
    assert says in line


def test_another_sglang_hooks_nothing_and_says_which_seam(srt: Path) -> None:
    path = srt / "managers" / "scheduler.py"
    path.write_text(path.read_text().replace("self, force", "self, force, why"))
    hooked, said = door(srt, PDBUS_SGLANG_METHOD="total_tokens")
    assert hooked == []
    (line,) = [line for line in said.splitlines() if "pdbus.plugin.off" in line]
    assert "SGLang 0.5.23 is not as it knows it (tested: 0.5.23)" in line
    assert "Scheduler.publish_load_snapshot takes (self, force, why), not (self, force)" in line
