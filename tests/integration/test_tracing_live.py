"""A cluster's requests told afterwards: by `pdbus trace`, as spans at a collector, and where Prometheus looks; and
settings that are read again while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import Collector
from rich.cells import cell_len

from bus.runtime.ports import free_ports
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

WAIT_S = 60.0
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01"
SIM = ("--sim-timing", "zero")


def pdbus(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pdbus", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | env,
    )  # fmt: skip


def poll_for(what: Callable[[], Any], why: str) -> Any:
    until = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < until, why
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    ports = free_ports("127.0.0.1", 5)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    spec = ClusterSpec(
        prefill=1, decode=2, engine="sim", model="sim", node_args=SIM, env=env, http="127.0.0.1:0", metrics_port=ports
    )
    with Cluster(spec) as running:
        yield running


def generate(cluster: Cluster, rid: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    url = cluster.children["edge"].facts["endpoint"]
    body = json.dumps({"input_ids": [3, 4, 5, 6], "sampling_params": {"max_new_tokens": 4}}).encode()
    named = {"content-type": "application/json", "x-request-id": rid, **(headers or {})}
    request = urllib.request.Request(f"{url}/generate", body, named)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        said: dict[str, Any] = json.loads(answer.read())
    return said


def test_the_life_of_a_request_is_told_hop_by_hop(cluster: Cluster) -> None:
    at = generate(cluster, "told")["meta_info"]["pdbus"]
    shown = pdbus("trace", "told", "--controller", cluster.controller, COLUMNS="80").stdout
    assert re.match(r"told-[0-9a-f]{8}: done after ", shown), shown
    assert max(map(cell_len, shown.split("\n"))) <= 80
    for line in ("client        asked for", "controller-0  received, 4 tokens", f"dispatched to {at['decode']}",
                 "prompt computed", "KV cache fetched", "first token", "leg over, length, 4 tokens"):  # fmt: skip
        assert line in shown, line
    found = pdbus("trace", "told", "--json", "--controller", cluster.controller)
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    marks = said["marks"]
    of_decode = [mark["what"] for mark in marks if mark["part"] == at["decode"]]
    assert [what for what in of_decode if what != "attached"] == [
        "taken", "handed", "began", "first_token", "fetched", "ended",
    ]  # fmt: skip
    ours = [mark for mark in marks if mark["part"] != "client"]
    unsure_s = sum(max(0, clock["rtt_us"]) for clock in said["clocks"]) / 1e6 + 0.001
    assert all(-unsure_s < mark["took_s"] < WAIT_S for mark in ours if mark["took_s"] is not None), "clocks agree"
    of_controller = [mark["what"] for mark in ours if mark["part"] == "controller-0"]
    assert (of_controller[0], of_controller[-1]) == ("received", "done")  # those of other clocks may be a little off


def test_an_unknown_rid_is_one_line_that_says_how_much_is_kept(cluster: Cluster) -> None:
    generate(cluster, "known")
    said = pdbus("trace", "unknown", "--controller", cluster.controller)
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.startswith("pdbus: error: no part knows a request 'unknown': controller-0 remembers the last ")
    assert said.stderr.count("\n") == 1
    long = pdbus("trace", "x" * 129, "--controller", cluster.controller)
    assert (long.returncode, long.stderr) == (2, "pdbus: error: a rid has 1 to 128 characters\n")


def test_spans_reach_a_collector_each_below_the_one_that_caused_it(cluster: Cluster, collector: Collector) -> None:
    generate(cluster, "spans", {"traceparent": HEADER})
    wanted = {"POST /generate", "pdbus request", "pdbus prefill", "pdbus decode"}

    def mine() -> Any:
        spans = {name: span for (trace, name), span in list(collector.spans.items()) if trace == TRACE}
        return spans if spans.keys() >= wanted else None

    spans = poll_for(mine, "spans of every part")
    edge, request = spans["POST /generate"], spans["pdbus request"]
    assert edge.parent_span_id.hex() == SPAN
    assert request.parent_span_id == edge.span_id
    for leg in ("pdbus prefill", "pdbus decode"):
        assert spans[leg].parent_span_id == request.span_id
        assert request.start_time_unix_nano <= spans[leg].end_time_unix_nano
    assert collector.services >= {"pdbus-edge", "pdbus-controller", "pdbus-node"}


def test_prometheus_is_told_where_every_part_is(cluster: Cluster, tmp_path: Path) -> None:
    ports = {child.name: child.spec.metrics_port for child in cluster.children.values() if child.spec.metrics_port}
    wanted = {f"127.0.0.1:{port}" for port in ports.values()}

    def told() -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{ports['controller-0']}/targets"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            said: list[dict[str, Any]] = json.loads(answer.read())
        return said

    found = poll_for(lambda: len(now := told()) == len(wanted) and now, "all parts have said it")
    assert {address for each in found for address in each["targets"]} == wanted
    labels = {each["targets"][0]: each["labels"] for each in found}
    decode = {"part": "node", "instance": "decode-0", "role": "decode", "dp_rank": "1"}
    assert labels[f"127.0.0.1:{ports['decode-0/1']}"] == decode
    printed = pdbus("targets", "--controller", cluster.controller)
    assert json.loads(printed.stdout) == found
    file = tmp_path / "targets.json"
    command = [sys.executable, "-P", "-m", "pdbus", "targets", "--watch", str(file), "--interval-s", "0.1",
               "--controller", cluster.controller]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE) as watching:
        try:
            poll_for(file.exists, "the file is there")
            assert json.loads(file.read_text(encoding="utf-8")) == found
        finally:
            watching.send_signal(signal.SIGTERM)
            watching.communicate(timeout=WAIT_S)


def test_a_request_whose_rank_dies_shows_both_attempts_and_who_is_silent() -> None:
    slow = ("--sim-base-s", "1.5")  # so that it is found before its first token
    with (
        Cluster(ClusterSpec(prefill=1, decode=2, engine="sim", node_args=(*SIM, *slow))) as cluster,
        Client(cluster.controller) as client,
    ):
        stream = client.generate_tokens([1, 2, 3], max_tokens=2, rid="twice")
        decode = poll_for(lambda: [r for r in client.status().ranks if r.role == "decode" and r.outstanding], "sent")
        rank = f"decode-0/{decode[0].dp_rank}"
        cluster.kill(rank)
        assert len(stream.tokens()) == 2
        said = json.loads(pdbus("trace", "twice", "--json", "--controller", cluster.controller).stdout)
        (retried,) = [mark for mark in said["marks"] if mark["what"] == "retried"]
        assert (retried["attempt"], retried["leg"]) == (1, "decode")
        assert retried["detail"].startswith(f"{rank}: peer_lost: ")
        assert {mark["attempt"] for mark in said["marks"] if mark["what"] == "dispatched"} == {1, 2}
        assert said["silent"] == [rank]
        shown = pdbus("trace", "twice", "--controller", cluster.controller).stdout
        assert f"did not answer, so what it knows is missing: {rank}" in shown


def test_every_part_reads_its_settings_again(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[controller]\nattempts = 3\n", encoding="utf-8")
    spec = ClusterSpec(
        unified=1, prefill=0, decode=0, engine="sim", model="sim", node_args=SIM, config=str(file), log_level="info",
        http="127.0.0.1:0",
    )  # fmt: skip
    with Cluster(spec) as cluster:

        def again(part: str, text: str, event: str) -> dict[str, Any]:
            """What the part logs after a SIGHUP with `text` in its file."""
            file.write_text(text, encoding="utf-8")
            before = len(lines(part, event))
            os.kill(cluster.children[part].pid, signal.SIGHUP)
            found: list[dict[str, Any]] = poll_for(lambda: lines(part, event)[before:], event)
            return found[-1]

        def lines(part: str, event: str) -> list[dict[str, Any]]:
            said = cluster.children[part].log.read_text(encoding="utf-8").split("\n")
            return [json.loads(line) for line in said if f'"event": "{event}"' in line]

        assert again("controller-0", "[controller]\nattempts = 5\nlease-s = 9\n", "settings.reloaded")["changed"] == {
            "attempts": 5
        }
        assert lines("controller-0", "settings.need_restart")[-1]["settings"] == ["lease-s"]
        kept = again("controller-0", "[controller]\nattempts = 0\n", "settings.kept")
        assert kept["why"] == "attempts must be greater than 0 and finite, not 0"
        said = again("unified-0/0", "[node]\nmax-waiting = 7\n", "settings.reloaded")
        assert said["changed"] == {"max-waiting": 7}
        assert again("broker", "[broker]\nmax-rooms = 99\n", "settings.reloaded")["changed"] == {"max-rooms": 99}
        assert again("edge", "[serve]\nmax-requests = 9\n", "settings.reloaded")["changed"] == {"max-requests": 9}
        with cluster.client() as client:
            assert len(client.generate_tokens([1, 2], max_tokens=3).tokens()) == 3, "and goes on"
