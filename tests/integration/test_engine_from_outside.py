"""An engine of another package: installed with its entry point, known by its name, run as a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

ROOT = Path(__file__).parents[2]
NODE = [sys.executable, "-P", "-m", "nodes.unified"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with examples/toy_engine installed, by what is here alone."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "toy_engine.py"):
        (source / name).write_bytes((ROOT / "examples" / "toy_engine" / name).read_bytes())
    install = ["install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_node_of_it_serves_requests(site: Path, tmp_path: Path) -> None:
    spec = ClusterSpec(
        unified=1, prefill=0, decode=0, engine="toy", model="capitals", engine_args=("--loud",),
        env={"PYTHONPATH": str(site)}, log_dir=str(tmp_path),
    )  # fmt: skip
    with Cluster(spec) as cluster, Client(cluster.controller) as client:
        (rank,) = client.status().ranks
        assert (rank.role, rank.model, rank.state) == ("unified", "capitals", "ready")
        prompt = [3 + byte for byte in b"hello"]
        result = client.generate_tokens(prompt, max_tokens=5).result
        assert (result.code, bytes(token - 3 for token in result.ids)) == ("ok", b"HELLO")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "toy"], "--engine toy needs a model: --model PATH"),
        (["--engine", "toy", "--model", "m", "--kv-tokens", "9"], "--kv-tokens is for our own engines; those of toy"),
        (["--engine", "top"], "'top' is not one of 'torch', 'numpy', 'sim', 'vllm', 'toy'"),
    ],
)
def test_mistakes_are_one_line(site: Path, arguments: list[str], words: str) -> None:
    done = subprocess.run(
        [*NODE, *arguments], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert words in done.stderr


@pytest.mark.parametrize("module", ["nodes.decode", "pdbus up"])
def test_an_engine_whose_decode_ranks_keep_nothing_is_not_asked_to(site: Path, module: str) -> None:
    command = [sys.executable, "-P", "-m", *module.split(), "--engine", "toy", "--model", "m", "--decode-cache"]
    done = subprocess.run(command, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "--decode-cache is not for the engine toy, whose decode ranks keep no KV caches" in done.stderr


def test_without_its_package_there_is_no_such_engine() -> None:
    done = subprocess.run([*NODE, "--engine", "toy"], env={}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'toy' is not one of 'torch', 'numpy', 'sim', 'vllm'" in done.stderr
