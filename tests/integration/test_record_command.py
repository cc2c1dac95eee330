"""`pdbus record` as a user calls it, on a live cluster of sim ranks with an engine of other people beside them."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from timelines import check_slices_and_arrows

from bus.runtime.keys import add_key, give_key, new_keys
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.timeline.live import NO_STEPS

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed_rank.py"
WAIT_S = 60.0


def pdbus(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdbus", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterSpec(prefill=2, decode=2, engine="sim", model="sim")) as running:
        yield running


@contextmanager
def requests_to(cluster: Cluster) -> Iterator[Client]:
    """Requests of 40 to 4,000 prompt tokens, four at a time, until this ends."""
    over = Event()

    def ask(client: Client, number: int) -> None:
        while not over.is_set():
            number += 1
            tokens = [3 + each % 500 for each in range(number, number + 40 + number * 331 % 4000)]
            assert client.generate_tokens(tokens, max_tokens=5 + number % 30, leg="pair").result.code == "ok"

    with cluster.client() as client:
        threads = [Thread(target=ask, args=(client, 1000 * at)) for at in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield client
        finally:
            over.set()
            for thread in threads:
                thread.join(WAIT_S)


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found["traceEvents"], found["otherData"]


def test_a_recording_has_each_ranks_steps_chunks_and_transfers_and_what_others_say(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "out.json.gz"
    lines = (EXAMPLE.parents[1] / "docs" / "tracing.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if each.startswith("    pdbus record")]
    command = [sys.executable, str(EXAMPLE), cluster.bus, cluster.controller]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as toy, requests_to(cluster):
        try:
            assert toy.stdout is not None
            assert toy.stdout.readline() == "READY instance=toy\n"
            done = pdbus(*line.replace("10s out.json.gz", f"3s {path}").split()[1:], "--controller", cluster.controller)
        finally:
            toy.terminate()
    assert done.returncode == 0, done.stderr
    events, about = read(path)
    written = f"{about['slices']:,} slices, {about['counters']:,} counter values, {about['flows']:,} arrows"
    assert done.stdout == f"wrote {path}: {written}; open it at https://ui.perfetto.dev\n"
    assert re.fullmatch(r"controller-0, 5 ranks, \d\.\d s from 20\d\d-[-0-9: ]+ UTC", about["notes"][0])
    assert f"toy/0: {NO_STEPS}" in about["notes"]
    check_slices_and_arrows(events)
    pids = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    assert pids.keys() == {
        "about this recording", "controller-0", "prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1",
        "toy/0 (unified)",
    }  # fmt: skip
    kinds: dict[int, set[str]] = defaultdict(set)
    for each in events:
        unit = f" {next(iter(each['args']))}" if each["ph"] == "C" else ""
        kinds[each["pid"]].add(each.get("cat", each["name"] + unit))
    for dp_rank in range(2):
        assert {"step", "chunk", "decode batch", "KV tokens", "running requests"} <= kinds[pids[f"prefill-0/{dp_rank}"]]
        assert {"step", "fetch", "decode batch", "KV tokens", "running requests"} <= kinds[pids[f"decode-0/{dp_rank}"]]
    assert kinds[pids["toy/0 (unified)"]] == {"process_name", "running requests", "waiting requests", "KV tokens"}
    assert kinds[pids["controller-0"]] >= {"waiting requests"}
    chunks = [each for each in events if each.get("cat") == "chunk"]
    fetches = [each for each in events if each.get("cat") == "fetch"]
    assert about["flows"] >= len(fetches) - 4 > 0, "four prompts at most were computed before the recording"
    assert max(each["args"]["tokens"] for each in chunks) > 1000
    spans = [each["ts"] for each in events if "ts" in each]
    assert 2.5e6 < max(spans) - min(spans) < 20e6


def test_ctrl_c_writes_what_there_is_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-P", "-m", "pdbus", "record", "5m", str(path), "--controller", cluster.controller]
    with requests_to(cluster), subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as recording:  # fmt: skip
        assert recording.stderr is not None
        assert recording.stderr.readline().startswith("recording: 2 s of 300 s"), "it has begun"
        recording.send_signal(signal.SIGINT)
        said, errors = recording.communicate(timeout=WAIT_S)
    assert recording.returncode == 130, errors
    assert said.startswith("ended early, after ")
    assert f" s of 300 s; wrote {path}: " in said
    events, about = read(path)
    assert about["slices"] > 20
    check_slices_and_arrows(events)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("soon", "{folder}/out.json"), "Invalid value for 'DURATION': 'soon' is no duration: give one as 10s, 500ms"),
        (("10h", "{folder}/out.json"), "Invalid value for 'DURATION': '10h' is no duration"),
        (("-1s", "{folder}/out.json"), "No such option"),
        (("1ms", "{folder}/out.json"), "Invalid value for 'DURATION': '1ms' is not between 0.1 s and 10 minutes"),
        (("11m", "{folder}/out.json"), "Invalid value for 'DURATION': '11m' is not between"),
        (("1s", "{folder}/none/out.json"), "cannot write {folder}/none/out.json: No such file or directory"),
        (("1s", "{folder}"), "cannot write {folder}: Is a directory"),
        (("1s",), "Missing argument 'FILE'"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_asked(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    asked = (each.format(folder=tmp_path) for each in arguments)
    done = pdbus("record", *asked, "--controller", "ipc:///nowhere/controller", "--wait-s", "30")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert why.format(folder=tmp_path) in line
    assert not list(tmp_path.iterdir())


def test_no_cluster_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    done = pdbus("record", "1s", str(tmp_path / "out.json"), "--controller", "ipc:///nowhere/controller",
                 "--wait-s", "0.2")  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("pdbus: error: no controller answers at ipc:///nowhere/controller")
    assert not list(tmp_path.iterdir())


def test_a_cluster_that_ends_meanwhile_leaves_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with Cluster(ClusterSpec(prefill=0, decode=0, unified=1, engine="sim")) as cluster:
        command = [sys.executable, "-P", "-m", "pdbus", "record", "6s", str(path), "--controller", cluster.controller]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as recording:
            assert recording.stderr is not None
            assert recording.stderr.readline().startswith("recording: ")
            cluster.children["unified-0/0"].process.kill()
            cluster.children["controller-0"].process.kill()
            said, errors = recording.communicate(timeout=WAIT_S)
    assert recording.returncode == 1, said
    assert "pdbus: error: the controller did not answer any more, from " in errors
    assert said.startswith(f"wrote {path}: ")
    _, about = read(path)
    assert any(note.startswith("unified-0/0: it did not answer ") for note in about["notes"])


def test_it_takes_a_viewers_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    new_keys(keys, ("unified-0",))
    add_key(keys, "viewers", "eyes")
    eyes, client = tmp_path / "eyes", tmp_path / "client"
    give_key(keys, "viewers", "eyes", eyes)
    add_key(keys, "clients", "other")
    give_key(keys, "clients", "other", client)
    spec = ClusterSpec(prefill=0, decode=0, unified=1, engine="sim", keys=str(keys))
    with Cluster(spec) as cluster:
        at = ("--controller", cluster.controller)
        refused = pdbus("record", "1s", str(tmp_path / "no.json"), *at, "--keys", str(client))
        assert refused.returncode == 1
        assert refused.stderr.splitlines()[-1] == (
            "pdbus: error: bad_identity: to record takes a viewer's or an admin's key"
        )
        assert not (tmp_path / "no.json").exists()
        allowed = pdbus("record", "1s", str(tmp_path / "yes.json"), *at, "--keys", str(eyes))
        assert allowed.returncode == 0, allowed.stderr
        assert (tmp_path / "yes.json").exists()
