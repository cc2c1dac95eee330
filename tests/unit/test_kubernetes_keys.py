"""What examples/kubernetes/keys.sh writes, and when it writes nothing; kubectl is played."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from docs_commands import ROOT, blocks

from bus.runtime.keys import add_key, give_key, new_keys

SCRIPT = ROOT / "examples" / "kubernetes" / "keys.sh"


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


def test_the_pages_commands_apply_what_it_writes_and_then_an_overlay_that_is_there(place: Path) -> None:
    (page,) = [block.text for block in blocks(ROOT / "docs" / "deploy.md") if block.text.startswith("sh examples/")]
    (place / "examples").symlink_to(ROOT / "examples")
    (place / "kubectl").write_text('#!/bin/sh\necho "$@" >> asked\n[ "$*" != "apply -f -" ] || cat > applied\n')
    env = os.environ | {"PATH": f"{place}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-ec", page], cwd=place, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    asked = (place / "asked").read_text().splitlines()
    assert asked[-1].startswith("apply -k ")
    assert (place / asked[-1].removeprefix("apply -k ") / "kustomization.yaml").exists()
    assert "apply -f -" in asked
    assert (place / "applied").read_text().startswith((SCRIPT.parent / "base" / "namespace.yaml").read_text())


@pytest.mark.parametrize("secret", ["clients/edge", "nodes/decode", "brokers/broker"])
def test_where_a_secret_was_given_away_nothing_is_written(place: Path, secret: str) -> None:
    role, name = secret.split("/")
    give_key(place / "keys", role, name, place / "given")  # type: ignore[arg-type]
    done = written(place)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"keys.sh: keys/secrets/{role}/")
    assert done.stderr.count("\n") == 1
