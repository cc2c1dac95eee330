"""What is missing is said before torch is imported and before any rank starts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from rich.console import Console

from bus.errors import ConfigError
from nodes.own.engines import factory, needs, numpy_weights
from nodes.own.kinds import TORCH
from pdbus import demo


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed: it is what this is about")
@pytest.mark.parametrize(
    ("patch", "model", "says"),
    [
        ("smollm2.PACKAGE = 'nobody-made-this'", "smollm2", "the model package nobody-made-this is missing; run: pip"),
        ("sys.modules['torch'] = None", "tiny", "the torch engine needs the Python package 'torch'; run: pip install"),
        ("", "nonsense", "no model 'nonsense'; choose one of smollm2, tiny"),
    ],
)
def test_what_is_missing_is_known_before_torch_is_imported(patch: str, model: str, says: str) -> None:
    code = (
        "import sys\nfrom bus.errors import ConfigError\nfrom nodes.own.engines import factory, reference, smollm2\n"
        f"{patch}\n"
        f"for load in (lambda: factory.build_engine(factory.EngineConfig(model={model!r}), None),"
        f" lambda: reference.generate_alone({model!r}, [5], 1)):\n"
        "    try:\n        load()\n    except ConfigError as error:\n        print(error)\n"
        "assert not sys.modules.get('torch')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [says in line for line in done.stdout.splitlines()] == [True, True], done.stdout


def test_the_models_are_those_that_can_be_loaded() -> None:
    assert set(factory.MODELS) == set(numpy_weights.LOADERS)
    weights = pytest.importorskip("nodes.own.engines.weights", reason="torch is not installed", exc_type=ImportError)
    assert set(factory.MODELS) == set(weights.LOADERS)


def test_the_demo_prepares_the_model_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(model: str, progress: Any) -> None:
        progress("reading the model", 0.5)
        raise ConfigError("the model package is missing")

    monkeypatch.setattr("nodes.own.kinds.TORCH", replace(TORCH, prepare=prepare))
    monkeypatch.setattr(demo, "Cluster", lambda *_, **__: pytest.fail("it started the ranks"))
    monkeypatch.setattr("pdbus.commands.common.PROGRESS_S", 0.0)
    with pytest.raises(ConfigError, match="the model package is missing"):
        demo.run(Console(quiet=True), model="smollm2", max_tokens=1, verify=False)
    assert capsys.readouterr().err == "reading the model: 50%\n"


def test_the_demo_counts_from_one_when_it_computes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nodes.own.engines.reference.generate_alone", lambda *_, **__: [7])
    answers = [demo.Answer("a", ids=[7]), demo.Answer("b", ids=[8])]
    demo._verify("tiny", answers, 1)
    assert [answer.equal for answer in answers] == [True, False]
    assert "to compare (1 of 2)" in capsys.readouterr().err.splitlines()[0]


def test_without_torch_numpy_is_the_engine_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = find_spec
    missing = {"torch"}
    for module in (factory, needs):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name in missing else there(name))
    assert factory.default_engine() == "numpy"
    missing.add("safetensors")
    with pytest.raises(ConfigError) as caught:
        factory.prepare("numpy", "smollm2")
    said = f"the numpy engine needs the Python package 'safetensors'; run: {needs.NUMPY_EXTRA}"
    assert str(caught.value) == said
