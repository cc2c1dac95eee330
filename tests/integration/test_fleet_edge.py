"""`/fleet` of an edge: for operators' keys, for this machine's own browsers without keys, and for no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest
from fleet_pages import WAIT_S, PageServer, error_of, next_event

from bus.errors import ConfigError
from bus.runtime.keys import add_key, give_key, new_keys
from pdbus.edge.config import EdgeConfig
from pdbus.edge.fleet import fleet_of
from pdbus.launcher import Cluster, ClusterSpec

API_KEYS = '[op]\nkey = "operators-key"\noperator = true\n[user]\nkey = "a-users-key"\n'


@contextmanager
def edge_of(cluster: Cluster, *options: str, http: str = "0") -> Iterator[PageServer]:
    server = PageServer("-m", "pdbus", "serve", "--http", http, "--controller", cluster.controller, *options)
    try:
        yield server
    finally:
        server.close()


def read_on(stream: HTTPResponse) -> None:
    """An event comes each second."""
    for _ in range(round(WAIT_S)):
        next_event(stream)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterSpec(prefill=0, decode=0, unified=1, engine="sim")) as running:
        yield running


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(API_KEYS)
    path.chmod(0o600)
    return path


def test_without_keys_this_machine_looks_under_its_own_names(cluster: Cluster) -> None:
    with edge_of(cluster, "--cors-origin", "*") as edge:
        assert edge.ask("/fleet").status == 200
        stream = edge.ask("/fleet/stream")
        event, body = next_event(stream)
        while not body.get("facts"):
            _, body = next_event(stream)
        assert event == "snapshot"
        assert body["head"]["loads"]
        assert not body["head"]["lines"], "and a broker that the edge does not ask is no trouble"
        for path in ("/fleet", "/fleet/stream"):
            assert error_of(edge.ask(path, host="evil.example"))[0] == 421
        assert error_of(edge.ask("/fleet/stream", origin="https://evil.example"))[0] == 403, "for all --cors-origin"
        assert edge.ask("/health", host="any.example").status == 200, "the API is for other names too"
        assert edge.leave() == 0, "with a stream that would have gone on"


def test_an_operators_key_looks_and_one_that_is_taken_away_is_cut_off(cluster: Cluster, api_keys: Path) -> None:
    with edge_of(cluster, "--api-keys", str(api_keys)) as edge:
        assert edge.ask("/fleet").status == 200, "the page asks for the key"
        assert error_of(edge.ask("/fleet/stream"))[0] == 401
        user = {"authorization": "Bearer a-users-key"}
        assert error_of(edge.ask("/fleet/stream", **user)) == (403, "the fleet is for keys with operator = true")
        for path in ("/fleet/rank/unified-0/0", "/fleet/request/rid=abcd"):
            assert error_of(edge.ask(path, **user))[0] == 403
        assert edge.ask("/load", **user).status == 200
        stream = edge.ask("/fleet/stream", authorization="Bearer operators-key")
        assert next_event(stream)[0] == "snapshot"
        api_keys.write_text(API_KEYS.replace("operator = true", "operator = false"))
        with pytest.raises((AssertionError, OSError)):  # it ends within an event, or between two
            read_on(stream)


def test_an_edge_that_other_machines_reach_shows_nothing_without_api_keys(cluster: Cluster) -> None:
    with edge_of(cluster, http="0.0.0.0:0") as edge:
        for path in ("/fleet", "/fleet/stream", "/fleet/rank/unified-0/0", "/fleet/request/rid=abcd"):
            status, why = error_of(edge.ask(path))
            assert (status, "API keys marked operator" in why) == (404, True)


def test_in_a_cluster_with_keys_it_takes_a_viewers_key_of_its_own(tmp_path: Path, api_keys: Path) -> None:
    keys = tmp_path / "keys"
    new_keys(keys, ("unified-0",))
    spec = ClusterSpec(prefill=0, decode=0, unified=1, engine="sim", keys=str(keys))
    with Cluster(spec) as cluster:
        options = ("--keys", str(keys), "--api-keys", str(api_keys))
        operator = {"authorization": "Bearer operators-key"}
        with edge_of(cluster, *options) as edge:
            why = error_of(edge.ask("/fleet/stream", **operator))
            assert why == (404, "the fleet takes a viewer's key of the edge's own: pdbus keys add KEYS viewer edge")
        add_key(keys, "viewers", "edge")
        with edge_of(cluster, *options) as edge:
            stream = edge.ask("/fleet/stream", **operator)
            _, body = next_event(stream)
            while not body.get("figures"):
                _, body = next_event(stream)
            assert body["head"]["loads"]
            assert body["head"]["events"]


def test_the_viewers_key_may_lie_elsewhere_and_a_clients_or_an_admins_is_none(tmp_path: Path) -> None:
    keys, out = tmp_path / "keys", tmp_path / "wall"
    new_keys(keys)
    assert isinstance(fleet_of(EdgeConfig(keys=str(keys)), "ipc:///x"), str), "an admin's and a client's are there"
    add_key(keys, "viewers", "wall")
    give_key(keys, "viewers", "wall", out)
    assert isinstance(fleet_of(EdgeConfig(keys=str(keys)), "ipc:///x"), str)
    assert callable(fleet_of(EdgeConfig(keys=str(keys), viewer_keys=str(out)), "ipc:///x"))
    with pytest.raises(ConfigError, match="no secret of a viewer"):
        fleet_of(EdgeConfig(keys=str(keys), viewer_keys=str(keys)), "ipc:///x")
