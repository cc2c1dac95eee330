"""What examples/kubernetes/keys.sh writes, and when it writes nothing; kubectl is played."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bus.runtime.keys import add_key, give_key, new_keys

SCRIPT = Path(__file__).parents[2] / "examples" / "kubernetes" / "keys.sh"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The keys of docs/deploy.md, and a kubectl that says what it was asked."""
    new_keys(tmp_path / "keys", ("prefill", "decode"))
    add_key(tmp_path / "keys", "controllers", "controller-1")
    if not (tmp_path / "keys" / "allow" / "clients" / "edge.key").exists():
        add_key(tmp_path / "keys", "clients", "edge")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\necho "$@"\n')
    kubectl.chmod(0o755)
    return tmp_path


def written(place: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{place}:{os.environ['PATH']}"}
    return subprocess.run(["sh", SCRIPT, "keys"], cwd=place, env=env, capture_output=True, text=True, timeout=60)


def test_the_namespace_comes_before_what_lies_in_it(place: Path) -> None:
    done = written(place)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.split("---\n")
    assert first == (SCRIPT.parent / "base" / "namespace.yaml").read_text()
    assert len(others) == 10
    assert all(each.startswith("create ") and "--namespace pdbus" in each for each in others)
    assert others[-1].endswith("--from-file=keys/secrets/clients/edge.secret\n")


@pytest.mark.parametrize("secret", ["clients/edge", "nodes/decode", "brokers/broker"])
def test_where_a_secret_was_given_away_nothing_is_written(place: Path, secret: str) -> None:
    role, name = secret.split("/")
    give_key(place / "keys", role, name, place / "given")  # type: ignore[arg-type]
    done = written(place)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"keys.sh: keys/secrets/{role}/")
    assert done.stderr.count("\n") == 1
