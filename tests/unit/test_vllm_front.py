"""vLLM's server in front of the bus, as far as no vLLM is needed: how it is started, and what is refused."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from click.testing import CliRunner, Result

from bus.errors import ConfigError
from pdbus.commands import serve, up
from pdbus.launcher import ClusterSpec
from pdbus.launcher.spec import Addresses, PartSpec
from pdbus.vllm_front import plugin
from pdbus.vllm_front.launch import model_arguments

AT = Addresses("ipc:///b", {"controller-0": "ipc:///c"}, "ipc:///d")


def said(*arguments: str) -> Result:
    return CliRunner().invoke(serve.serve, arguments)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--front", "vllm", "--api-keys", "keys"],
            "--api-keys is the light edge's; for --front vllm there is --api-key",
        ),
        (["--front", "vllm", "--max-requests", "5"], "--max-requests is the light edge's"),
        (["--front", "vllm", "--tokenizer", "x"], "--tokenizer is the light edge's"),
        (["--model", "m"], "--model: it is for --front vllm"),
        (["--", "--dtype", "auto"], "--dtype: it is for --front vllm"),
    ],
)
def test_options_of_the_other_front_are_refused_by_name(arguments: list[str], why: str) -> None:
    ended = said(*arguments)
    assert isinstance(ended.exception, ConfigError)
    assert str(ended.exception).startswith(why)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_says_how_to_install_it() -> None:
    ended = said("--front", "vllm", "--model", "m")
    assert str(ended.exception).startswith("--front vllm needs the Python package 'vllm'; run: pip install vllm")


def test_the_plugin_imports_nothing_and_does_nothing_without_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "pdbus.vllm_front.seams", raising=False)
    plugin.load()
    assert "pdbus.vllm_front.seams" not in sys.modules


def test_of_an_engines_arguments_those_of_the_model_are_the_fronts_too() -> None:
    given = (
        "--tensor-parallel-size", "2", "--served-model-name", "chat", "--max_model_len=4096", "--enforce-eager",
        "--trust-remote-code", "--gpu-memory-utilization", "0.4", "--reasoning-parser", "qwen3",
    )  # fmt: skip
    assert model_arguments(given) == (
        "--served-model-name", "chat", "--max_model_len=4096", "--trust-remote-code", "--reasoning-parser", "qwen3",
    )  # fmt: skip


def edge(**settings: object) -> PartSpec:
    spec = ClusterSpec(prefill=1, decode=1, http="8000", **settings)  # type: ignore[arg-type]
    return spec.parts(AT)[-1]


def test_a_cluster_starts_the_front_that_was_chosen() -> None:
    light = edge(engine="sim", tokenizers=("m=bytes",))
    assert light.early
    assert "--front" not in light.args
    part = edge(
        engine="vllm", model="/m", front="vllm", front_args=("--tool-call-parser", "hermes"),
        engine_args=("--dtype", "float32", "--enforce-eager"),
    )  # fmt: skip
    assert not part.early  # it is ready no sooner than the nodes, so it is started with them
    at = part.args.index("--front")
    assert part.args[at:] == (
        "--front", "vllm", "--model", "/m", "--", "--dtype", "float32", "--tool-call-parser", "hermes",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine": "vllm", "model": "m", "front": "vllm", "tokenizers": ("d",)}, "--tokenizer is the light edge's"),
        ({"engine": "sim", "front_args": ("--x",)}, "--front-args are for --front vllm"),
    ],
)
def test_what_does_not_fit_the_front_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        edge(**settings)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--front", "vllm", "--model", "sim"], "--front vllm needs a model that vLLM knows, which sim is not"),
        (["--front-args", "'"], "--front-args: No closing quotation"),
    ],
)
def test_up_refuses_a_front_that_cannot_be(arguments: list[str], why: str) -> None:
    ended = CliRunner().invoke(up.up, ["--engine", "sim", "--http", "8000", *arguments])
    assert isinstance(ended.exception, ConfigError)
    assert str(ended.exception) == why


def test_the_line_that_up_prints_asks_for_the_model_by_the_name_under_which_it_is_served() -> None:
    def served(*front_args: str, engine_args: tuple[str, ...] = ()) -> str:
        return ClusterSpec(
            unified=1, engine="vllm", model="/m", front="vllm", front_args=front_args, engine_args=engine_args
        ).served_model

    assert served() == served("--tool-call-parser", "hermes") == "/m"
    assert served("--served-model-name", "coder", "other", "--enable-auto-tool-choice") == "coder"
    assert served("--served_model_name=coder", engine_args=("--served-model-name", "chat")) == "coder"
    assert served(engine_args=("--served-model-name", "chat")) == "chat"
    assert served("--served-model-name") == ""
