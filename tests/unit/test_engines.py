"""The registry of engines: what each name leads to, and what is said of those that cannot be had."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from bus.errors import ConfigError
from nodes import engines
from nodes.engines import BUILT_IN, EngineKind, check_arguments, kind_of
from nodes.own.engines.factory import ENGINES, EngineConfig
from nodes.vllm.kind import VllmConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_name_leads_to_a_kind(name: str) -> None:
    assert isinstance(kind_of(name), EngineKind)


def test_our_own_engines_are_those_that_can_be_built() -> None:
    assert [name for name in BUILT_IN if kind_of(name).our_options] == list(ENGINES)


def test_each_kind_has_settings_of_its_own() -> None:
    options = {"model": "m", "kv_tokens": 64, "sim_timing": "h100-8b", "sim_base_s": 0.5}
    ours = kind_of("sim").settings(options, ())
    assert isinstance(ours, EngineConfig)
    assert (ours.engine, ours.kv_tokens, ours.timing.base_s) == ("sim", 64, 0.5)
    assert kind_of("vllm").settings(options, ("--dtype", "float32")) == VllmConfig("m", ("--dtype", "float32"))


def test_arguments_are_for_those_that_take_them() -> None:
    check_arguments("vllm", ["--dtype"])
    check_arguments("sim", [])
    with pytest.raises(ConfigError, match="'--dtype': only --engine vllm takes arguments"):
        check_arguments("sim", ["--dtype"])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:KIND", "cannot be loaded: No module named 'no_such_module'"),
        ("nodes.engines:NONE", "cannot be loaded: module 'nodes.engines' has no attribute 'NONE'"),
        ("nodes.engines:names", "is no nodes.EngineKind"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, value: str, why: str) -> None:
    entry = EntryPoint("odd", value, engines.GROUP)
    monkeypatch.setattr(engines, "_outside", lambda: {"odd": entry})
    assert engines.names() == (*BUILT_IN, "odd")
    with pytest.raises(ConfigError, match="the engine 'odd'") as caught:
        kind_of("odd")
    assert str(caught.value).endswith(why)
    with pytest.raises(ConfigError, match="no engine 'none'; choose one of torch, numpy, sim, vllm, odd"):
        kind_of("none")


def test_no_engine_from_outside_takes_a_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("sim", "no_such_module:KIND", engines.GROUP)
    monkeypatch.setattr(engines, "entry_points", lambda group: [entry])
    engines._outside.cache_clear()
    try:
        assert engines.names() == tuple(BUILT_IN)
        assert kind_of("sim").our_options
    finally:
        engines._outside.cache_clear()


def test_nobody_asks_for_the_name_of_an_engine() -> None:
    """What differs between engines is in their kinds: elsewhere no module compares a name with `vllm`. Of the engine
    `sim` the lab knows more, since it is the lab's own model."""
    asking = []
    for path in sorted(each for package in ("nodes", "pdbus") for each in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "vllm" in text else ():
            if isinstance(node, ast.Compare) and any(
                isinstance(side, ast.Constant) and side.value == "vllm" for side in (node.left, *node.comparators)
            ):
                asking.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert asking == []


def test_an_older_click_will_do() -> None:
    """Before 8.2 its Choice takes no subscript."""
    code = "import click; click.Choice = type('Choice', (), {}); import nodes.engines"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
