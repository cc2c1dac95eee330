"""The dashboard and the alert rules of examples/observability, over a live cluster: every metric they name is there.
What they show is held against known traffic by tests/metrics, on a real Prometheus."""

from __future__ import annotations

import importlib.util
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import laws
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bus.runtime.ports import free_ports
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

HERE = Path(__file__).parents[2] / "examples" / "observability"
WAIT_S = 60.0


def panels() -> dict[str, list[str]]:
    """The queries of each panel, as dashboard.py has them."""
    spec = importlib.util.spec_from_file_location("dashboard", HERE / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {title: [query for query, _ in queries] for row in module.PANELS.values() for title, _, _, queries in row}


def alerts() -> dict[str, str]:
    (group,) = yaml.safe_load((HERE / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def poll_for(what: Callable[[], Any], why: str) -> Any:
    until = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < until, why
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    port = free_ports("127.0.0.1", 4)
    with Cluster(
        ClusterSpec(prefill=1, decode=1, engine="sim", metrics_port=port, node_args=("--max-running", "8"))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def ports(cluster: Cluster) -> list[int]:
    return [child.spec.metrics_port for child in cluster.children.values()]


def load(cluster: Cluster, count: int = 4) -> None:
    with Client(cluster.controller) as client:
        for stream in [client.generate_tokens(list(range(1, 100)), max_tokens=5) for _ in range(count)]:
            stream.tokens()


def test_the_dashboard_is_what_its_script_makes() -> None:
    board = json.loads((HERE / "dashboard.json").read_text(encoding="utf-8"))
    drawn = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    assert drawn == panels(), "run: make dashboard"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_every_metric_that_they_name_is_there(cluster: Cluster, ports: list[int]) -> None:
    load(cluster)

    def missing() -> set[str]:
        families = [
            family
            for port in ports
            for family in text_string_to_metric_families(fetched(f"http://127.0.0.1:{port}/metrics"))
        ]
        there = {family.name for family in families} | {f"{family.name}_total" for family in families}
        there |= {f"{family.name}_bucket" for family in families if family.type == "histogram"}
        queries = [*alerts().values(), *(query for each in panels().values() for query in each)]
        return {name for query in queries for name in re.findall(r"pdbus_\w+", query)} - there

    poll_for(lambda: not missing(), "a second has passed")
    assert not missing()


def test_at_rest_all_parts_obey_the_laws_of_their_counters(cluster: Cluster) -> None:
    """By what they say over the wire and show to Prometheus; what one has received, another has sent."""
    load(cluster)
    with Client(cluster.controller) as client:
        poll_for(lambda: not any(rank.in_flight_requests for rank in client.status().ranks), "all is acknowledged")
        status = client.status()
    laws.check(laws.of_status(status), rest=True)
    ranks = {f"{rank.instance}/{rank.dp_rank}": rank for rank in status.ranks}
    parts = {name: child.spec.metrics_port for name, child in cluster.children.items()}

    def seen() -> list[tuple[str, laws.Snapshot]]:
        pages = {name: fetched(f"http://127.0.0.1:{port}/metrics") for name, port in parts.items()}
        nodes = {name: laws.of_text(page, "node") for name, page in pages.items() if name in ranks}
        ended = {name: sum(count for code, count in node.items() if code.startswith("legs_ended_"))
                 for name, node in nodes.items()}  # fmt: skip
        names = ("kv_received_bytes", "kv_sent_bytes")
        return [
            ("broker", laws.of_text(pages["broker"], "broker")),
            *(("node", node) for node in nodes.values()),
            *(
                ("pair", {"received": ended[name], "sent": ranks[name].dispatched_total, "unbroken": 1})
                for name in ranks
            ),
            ("cluster", {name: sum(node[name] for node in nodes.values()) for name in names}),
        ]

    poll_for(lambda: not any(laws.broken(*each, rest=True) for each in seen()), "pages are a second old")
    told = dict(seen())
    assert told["broker"]["rooms_registered"] >= 4
    assert told["cluster"]["kv_received_bytes"] > 0


def test_each_series_of_a_controller_says_whose_it_is(cluster: Cluster) -> None:
    """Else those of several controllers over the same ranks are one series, which jumps between them."""
    port = cluster.children["controller-0"].spec.metrics_port
    families = list(text_string_to_metric_families(fetched(f"http://127.0.0.1:{port}/metrics")))
    ours = [sample for family in families for sample in family.samples if sample.name.startswith("pdbus_controller_")]
    assert ours
    assert {sample.labels.get("controller") for sample in ours} == {"controller-0"}


def test_the_configuration_finds_every_part_at_the_controller(cluster: Cluster, ports: list[int]) -> None:
    config = yaml.safe_load((HERE / "prometheus.yml").read_text(encoding="utf-8"))
    (finds,) = config["scrape_configs"][0]["http_sd_configs"]
    at_the_controller = cluster.children["controller-0"].spec.metrics_port
    assert finds["url"].endswith(f":{9100 + 1}/targets"), "the second part that pdbus up starts"
    wanted = {f"127.0.0.1:{port}" for port in ports}

    def found() -> bool:
        told = json.loads(fetched(f"http://127.0.0.1:{at_the_controller}/targets"))
        return {address for each in told for address in each["targets"]} == wanted

    poll_for(found, "all parts are told of")
