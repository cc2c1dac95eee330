"""`pdbus up --ray` over real Ray nodes: what dies comes back, nothing accepted is lost, nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from machines import HEAD, Machines, gone
from request_load import Load
from up_process import Up

from bus.errors import PeerLost
from bus.runtime.keys import add_key, give_key, new_keys, revoke_key
from bus.runtime.ports import free_ports
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

SIM = ("--model", "sim", "--prefill", "2", "--decode", "2")
SLOW = ("--", "--sim-base-s", "0.01")  # 40 tokens take 0.4 s
PARTS = ("broker", "controller-0", "prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1")


@pytest.fixture(scope="module")
def ray() -> Iterator[Machines]:
    with Machines() as machines:
        yield machines


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pd") as path:
        yield Path(path)


def over(ray: Machines, host: str = HEAD) -> tuple[str, ...]:
    base = free_ports(host, 5)
    at = ("--bus", f"tcp://{host}:{base}", "--controller", f"tcp://{host}:{base + 3}")
    return ("--ray", "--ray-address", ray.address, *at)


def homes(up: Up) -> dict[str, str]:
    """The address of each part's machine, as `up` said at its start."""
    return {part: up.until("stdout", rf"{part}\s.*tcp://([\d.]+):")[1] for part in PARTS}


def pdbus(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdbus", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def poll_for(done: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def option(pid: int, name: str) -> str:
    words = psutil.Process(pid).cmdline()
    return words[words.index(name) + 1]


def test_a_machine_of_the_cluster_dies_under_load(ray: Machines, directory: Path) -> None:
    """Its ranks come back on another one, as do a part and an actor that are killed; every request ends rightly."""
    worker = ray.add("127.0.0.3", num_cpus=2)
    where = over(ray)
    with Up(directory, *where, *SIM, "--log-level", "info", *SLOW) as up, Load(up.controller) as load:
        first = {part: up.pid(part) for part in PARTS}
        at = homes(up)
        lost = [part for part in PARTS if at[part] == "127.0.0.3"]
        assert len(lost) == 2, "SPREAD: each instance has a rank on each machine"
        assert {part.partition("/")[0] for part in lost} == {"prefill-0", "decode-0"}
        load.right(12)
        ray.kill(worker)
        for part in lost:
            up.until("stderr", rf"^pdbus up: {part}: its actor on 127\.0\.0\.3 is gone; Ray starts it again$")
            up.until("stderr", rf"^pdbus up: {part} is back on 127\.0\.0\.2 \(pid \d+\)$")
        load.right(12)
        assert all(gone(first[part]) for part in lost)

        up.kill_and_await("controller-0")
        load.right(12)
        killed = up.pid("decode-0/0")
        heard = len(up.said["stderr"])
        os.kill(psutil.Process(killed).ppid(), signal.SIGKILL)  # the actor: its part dies with it
        up.until("stderr", rf"(?s)\A.{{{heard}}}.*^pdbus up: decode-0/0 is back on 127\.0\.0\.2")
        assert gone(killed)
        load.right(12)
        load.finish()
        poll_for(lambda: pdbus("status", *where[3:]).returncode == 0)
        pids = [up.pid(part) for part in PARTS]
        up.process.send_signal(signal.SIGTERM)
        assert up.end() == 130
    assert all(gone(pid) for pid in pids)
    assert "Traceback" not in up.said["stderr"]


def test_ranks_have_their_gpus_and_parts_their_own_keys_alone(ray: Machines, directory: Path) -> None:
    """And an edge is placed too: it answers over HTTP."""
    keys = directory / "keys"
    new_keys(keys)
    add_key(keys, "clients", "alice")
    give_key(keys, "clients", "alice", directory / "alice")
    worker = ray.add("127.0.0.4", num_cpus=0, num_gpus=2)
    http = f"{HEAD}:{free_ports(HEAD, 1)}"
    config = directory / "cluster.toml"
    config.write_text("[node]\nsim-base-s = 0.001\n")
    more = ("--keys", str(keys), "--http", http, "--decode-resources", "GPU=1", "--config", str(config))
    with Up(directory / "run", *over(ray), *SIM, *more) as up:
        at, pids = homes(up), {part: up.pid(part) for part in (*PARTS, "edge")}
        assert {at["decode-0/0"], at["decode-0/1"]} == {"127.0.0.4"}
        gpus = [psutil.Process(pids[part]).environ()["CUDA_VISIBLE_DEVICES"] for part in ("decode-0/0", "decode-0/1")]
        assert sorted(gpus) == ["0", "1"]

        secrets = {path.stem: path.read_text().strip() for path in keys.rglob("*.secret")}
        folders = [Path(option(pid, "--keys")) for pid in pids.values()]
        assert len(set(folders)) == len(pids), "each has a list of its own"
        assert not [path for folder in folders for path in folder.rglob("*.secret")], "it lies there until it was read"
        words = " ".join(word for pid in pids.values() for word in psutil.Process(pid).cmdline())
        assert not [name for name, secret in secrets.items() if secret in words]
        assert str(config) not in words, "it has a copy"
        with Client(up.controller, keys=str(directory / "alice")) as client:
            assert client.generate_tokens([5, 6, 7], max_tokens=9).tokens() == sim_generate([5, 6, 7], 9)
        with Client(up.controller, connect_timeout_s=1.0) as stranger, pytest.raises(PeerLost):
            stranger.status(timeout_s=1.0)
        body = json.dumps({"model": "sim", "prompt": "hello", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"http://{http}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        revoke_key(keys, "clients", "alice")
        for folder in folders:
            poll_for(lambda folder=folder: not (folder / "allow" / "clients" / "alice.key").exists())
        heard = len(up.said["stderr"])
        os.kill(psutil.Process(pids["controller-0"]).ppid(), signal.SIGKILL)
        up.until("stderr", rf"(?s)\A.{{{heard}}}.*^pdbus up: controller-0 is back on")
        again = Path(option(up.pid("controller-0"), "--keys")) / "allow" / "clients"
        poll_for(lambda: not (again / "alice.key").exists())
        up.process.send_signal(signal.SIGINT)
        assert up.end() == 130
    assert not [path for folder in folders for path in folder.rglob("*.secret")]
    ray.kill(worker)


def test_drained_ranks_stay_away_and_what_runs_comes_to_its_end(ray: Machines, directory: Path) -> None:
    where = over(ray)
    with Up(directory, *where, *SIM, "--", "--sim-base-s", "0.02") as up, Client(up.controller) as client:
        assert pdbus("drain", "--controller", up.controller, "prefill-0/1").returncode == 0
        up.until("stderr", "^pdbus up: prefill-0/1 has left$")
        pieces = iter(client.generate_tokens([5, 6, 7], max_tokens=200))  # 4 s
        tokens = [*next(pieces).ids]
        up.process.send_signal(signal.SIGTERM)
        up.until("stderr", "draining; Ctrl-C again ends it at once")
        tokens += [token for piece in pieces for token in piece.ids]
        assert tokens == sim_generate([5, 6, 7], 200)
        assert up.end() == 130


def test_the_second_ctrl_c_waits_for_nothing(ray: Machines, directory: Path) -> None:
    with Up(directory, *over(ray), *SIM, *SLOW) as up, Client(up.controller, retries=0) as client:
        pieces = iter(client.generate_tokens([5, 6, 7], max_tokens=60_000))  # ten minutes
        next(pieces)
        pids = [up.pid(part) for part in PARTS]
        up.process.send_signal(signal.SIGINT)
        up.until("stderr", "draining; Ctrl-C again ends it at once")
        up.process.send_signal(signal.SIGINT)
        assert up.end() == 130
    assert all(gone(pid) for pid in pids)
    assert "Traceback" not in up.said["stderr"]


def test_nothing_outlives_an_up_that_is_killed(ray: Machines, directory: Path) -> None:
    with Up(directory, *over(ray), *SIM) as up:
        pids = [up.pid(part) for part in PARTS]
    assert all(gone(pid) for pid in pids)


def test_the_machine_with_the_addresses_is_the_cluster(ray: Machines, directory: Path) -> None:
    worker = ray.add("127.0.0.5", num_cpus=1)
    with Up(directory, *over(ray, "127.0.0.5"), *SIM) as up:
        pids = [up.pid(part) for part in PARTS]
        ray.kill(worker)
        assert up.end() == 3
    last = up.said["stderr"].splitlines()[-1]
    assert re.fullmatch(
        r"pdbus: error: (broker|controller-0): its Ray node 127\.0\.0\.5 is gone, and with it the address that others "
        r"know",
        last,
    )
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--", "--kv-tokens", "-1"), 2, r"(prefill|decode)-0/\d: --kv-tokens, .* must not be negative"),
        (
            ("--decode-resources", "CPU=99", "--start-timeout-s", "2"),
            3,
            r"Ray has no resources for decode-0 \(2 x CPU=99\) by SPREAD within 2 s; free on \d nodes: CPU=2",
        ),
        (
            ("--ray-address", "127.0.0.9:6379"),
            2,
            r"no Ray cluster at '127\.0\.0\.9:6379' \(.* Connection refused\); start one with: ray start --head",
        ),
        (
            ("--bus", "tcp://127.0.0.9:5550"),
            2,
            r"'tcp://127\.0\.0\.9:5550': no Ray node has that address; there are 127\.0\.0\.2 \(head\)",
        ),
    ],
)
def test_what_cannot_be_started_is_one_line(
    ray: Machines, directory: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    with Up(directory, *over(ray), *SIM, *arguments, ready=False) as up:
        assert up.end() == code
    assert re.fullmatch(rf"pdbus: error: {says}", up.said["stderr"].splitlines()[-1]), up.said["stderr"]
    assert "Traceback" not in up.said["stderr"]
