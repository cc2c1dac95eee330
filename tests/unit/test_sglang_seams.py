"""What is compared before anything of SGLang is hooked, against its recorded signatures; there is no SGLang here."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from sglang_skeleton import RECORDED, write

from pdbus.sglang import seams
from pdbus.sglang.server import ServerSide
from pdbus.sglang.settings import read

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


LOAD = """
from pdbus.sglang.plugin import load
before = set(sys.modules)
load()
print("imported", len(set(sys.modules) - before), flush=True)
"""
CHILD = "from pdbus.sglang.plugin import load; load()"


def door(srt: Path, *imported: str, do: str = LOAD, **environ: str) -> tuple[list[str], str]:
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
    imports = "".join(f"import sglang.srt.{module}\n" for module in imported)
    script = srt.parent.parent / "main.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, multiprocessing, sys

            def run(what):
                exec(what, globals())

            def child(how, what):
                print("-- child", flush=True)
                process = multiprocessing.get_context(how).Process(target=run, args=(what,))
                process.start()
                process.join()

            if __name__ == "__main__":
                run({imports + do!r})
            """
        )
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PDBUS_", "SGLANG_"))}
    path = os.pathsep.join([str(srt.parent.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, script], env=clean | {"PYTHONPATH": path} | environ, text=True, timeout=240,
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


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_server_may_be_a_child_of_multiprocessing(srt: Path, how: str) -> None:
    """As somebody's launcher starts it, which loads no plugins itself; its own children take its word."""
    say = "print('drawn', os.environ['PDBUS_SGLANG_DRAWN'], flush=True)"
    nested = f"{CHILD}; {say}; child({how!r}, {f'{CHILD}; {say}'!r})"
    hooked, said = door(srt, do=f"child({how!r}, {nested!r})", PDBUS_SGLANG="on")
    assert len(hooked) == 4
    assert hooked[:2] == hooked[2:]
    drawn = re.findall(r"drawn (\d+)", said)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_where_a_servers_main_process_refuses_its_children_say_it_no_more(srt: Path, how: str) -> None:
    path = srt / "managers" / "scheduler.py"
    path.write_text(path.read_text().replace("self, force", "self, force, why"))
    nested = f"{CHILD}; child({how!r}, {CHILD!r})"
    hooked, said = door(srt, do=f"child({how!r}, {nested!r})", PDBUS_SGLANG="on")
    assert hooked == []
    assert said.count("pdbus.plugin.off") == 1
    assert said.count("-- child") == 2


# --- the settings of a server, as SGLang resolves them ----------------------------------------------------------------


class Record(SimpleNamespace):
    """Of a server's settings, what is read while they are resolved."""

    def __init__(self, role: str, method: str, **more: object) -> None:
        fields = {"max_ep_size": None, "use_ray": False, "enable_pd_role_switch": False} | more
        super().__init__(disaggregation_mode=role, load_balance_method=method, **fields)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[ServerSide, Record], str]:
    """SGLang's own step under ours: which method it comes to."""
    for name, members in {
        "model_override_base": {"resolving_view": lambda record: record},
        "overrides": {"declare_resolution": lambda record, _source, **fields: vars(record).update(fields)},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        for parent in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, f"sglang.srt.arg_groups.{name}", module)

    def stock(record: Record) -> None:
        if record.load_balance_method == "auto":
            follows = record.disaggregation_mode == "prefill"
            record.load_balance_method = "follow_bootstrap_room" if follows else "round_robin"

    def resolved(side: ServerSide, record: Record) -> str:
        side.choose_method(record, stock)
        return str(record.load_balance_method)

    return resolved


@pytest.mark.parametrize(
    ("role", "named", "method", "ours"),
    [
        ("prefill", "auto", "round_robin", ""),
        ("prefill", "follow_bootstrap_room", "round_robin", "follow_bootstrap_room"),
        ("prefill", "total_tokens", "total_tokens", "total_tokens"),
        ("decode", "auto", "round_robin", ""),
    ],
)
def test_what_the_operator_names_is_what_ours_does_and_rooms_are_registered(
    resolve: Callable[[ServerSide, Record], str], role: str, named: str, method: str, ours: str
) -> None:
    environ = {"PDBUS_SGLANG": "on"}
    side = ServerSide(read(environ), environ)
    assert resolve(side, Record(role, named)) == method
    assert read(environ).named == side.settings.named == ours


def test_each_server_of_a_process_draws_a_number_of_its_own(resolve: Callable[[ServerSide, Record], str]) -> None:
    environ = {"PDBUS_SGLANG": "on", "PDBUS_SGLANG_DRAWN": "5"}
    side = ServerSide(read(environ), environ)
    side.others = (other := SimpleNamespace(settings=None),)
    drawn = []
    for _ in range(2):
        resolve(side, Record("decode", "auto"))
        drawn.append(side.settings.nonce)
        assert read(environ).nonce == other.settings.nonce == drawn[-1]
    assert len({5, *drawn}) == 3
    environ = {"PDBUS_SGLANG": "on", "PDBUS_SGLANG_NONCE": "9"}
    side = ServerSide(read(environ), environ)
    resolve(side, Record("decode", "auto"))
    assert read(environ).nonce == side.settings.nonce == 9


@pytest.mark.parametrize("why", [{"use_ray": True}, {"enable_pd_role_switch": True}, {"max_ep_size": 8}])
def test_the_method_of_a_server_that_is_left_to_sglang_is_left_too(
    resolve: Callable[[ServerSide, Record], str], why: dict[str, object]
) -> None:
    environ = {"PDBUS_SGLANG": "on"}
    assert resolve(ServerSide(read(environ), environ), Record("prefill", "auto", **why)) == "follow_bootstrap_room"
