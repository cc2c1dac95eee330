"""Which processes a cluster is made of, and how they are told about each other."""

from __future__ import annotations

import dataclasses
import socket
import tempfile
from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.runtime.ports import free_ports
from pdbus.launcher.addresses import choose
from pdbus.launcher.cluster import Cluster
from pdbus.launcher.spec import ClusterSpec, PartSpec

HERE = Path("/tmp/pdx")


def parts(spec: ClusterSpec) -> dict[str, PartSpec]:
    return {part.name: part for part in spec.parts(choose(spec, HERE))}


def option(part: PartSpec, name: str) -> list[str]:
    return [part.args[i + 1] for i, word in enumerate(part.args) if word == name]


def test_one_controller() -> None:
    made = parts(ClusterSpec(prefill=3, decode=2, ranks_per_process=2, decode_method="total_tokens"))
    assert list(made) == ["broker", "controller-0", "prefill-0/0-1", "prefill-0/2", "decode-0/0-1"]
    assert option(made["controller-0"], "--decode-method") == ["total_tokens"]
    assert option(made["controller-0"], "--instance") == []
    assert option(made["controller-0"], "--expect") == ["prefill", "decode"], "missed also by its next start"
    last = made["prefill-0/2"]
    assert last.module == "nodes.prefill"
    assert (option(last, "--dp-size"), option(last, "--dp-rank")) == (["3"], ["2"])
    assert option(last, "--controller") == option(made["controller-0"], "--controller")
    assert {tuple(option(part, "--bus")) for part in made.values()} == {("ipc:///tmp/pdx/bus",)}
    assert all("--watch-parent" in part.args for part in made.values())


def test_a_controller_for_each_instance_serves_it_alone() -> None:
    made = parts(ClusterSpec(prefill=1, decode=1, decode_instances=2, controllers="per_instance"))
    assert option(made["controller-decode-1"], "--instance") == ["decode-1"]
    assert option(made["controller-decode-1"], "--expect") == ["decode"]
    assert option(made["decode-1/0"], "--controller") == option(made["controller-decode-1"], "--controller")
    assert len({tuple(option(part, "--controller")) for part in made.values() if part.kind == "controller"}) == 3


def test_an_edge_comes_last_and_has_its_metrics_on_its_own_port() -> None:
    made = parts(ClusterSpec(unified=1, http="0.0.0.0:8000", metrics_port=9400, keys="k", transport="tcp"))
    *_, (name, edge) = made.items()
    assert (name, edge.kind, edge.module, edge.args[0]) == ("edge", "edge", "pdbus", "serve")
    assert option(edge, "--http") == ["0.0.0.0:8000"]
    assert option(edge, "--controller") == option(made["controller-0"], "--controller")
    assert (option(edge, "--keys"), option(edge, "--metrics-port"), edge.metrics_port) == (["k"], [], 0)
    assert "--watch-parent" in edge.args
    with pytest.raises(ConfigError, match="one controller"):
        ClusterSpec(prefill=1, decode=1, controllers="per_instance", http="8000")


def test_an_edge_is_told_where_tokenizers_are() -> None:
    made = parts(ClusterSpec(unified=1, http="8000", tokenizers=("a=/models/a", "bytes")))
    assert option(made["edge"], "--tokenizer") == ["a=/models/a", "bytes"]


def test_embedded_starts_nodes_alone_and_arguments_reach_their_part() -> None:
    made = parts(ClusterSpec(unified=1, embedded=True, node_args=("--a", "1"), unified_args=("--b", "2")))
    assert list(made) == ["unified-0/0"]
    assert made["unified-0/0"].args[-4:] == ("--a", "1", "--b", "2")


def test_fixed_addresses_are_kept() -> None:
    made = parts(ClusterSpec(unified=1, transport="tcp", bus="tcp://127.0.0.1:7000", controller="tcp://127.0.0.1:7100"))
    assert option(made["unified-0/0"], "--bus") == ["tcp://127.0.0.1:7000"]
    assert option(made["unified-0/0"], "--controller") == ["tcp://127.0.0.1:7100"]
    assert option(made["unified-0/0"], "--data") == ["tcp://127.0.0.1"]


@pytest.mark.parametrize("folder", ["a b", "ü", "long" * 20])
def test_a_temporary_folder_in_which_sockets_cannot_lie_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Before anything starts; over tcp it does no harm."""
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    with pytest.raises(
        ConfigError, match=rf"^\$TMPDIR, '.*{folder}', is no place for sockets: name a directory .*80 bytes"
    ):
        Cluster(ClusterSpec(unified=1, engine="sim", model="sim")).start()
    assert not list((tmp_path / folder).iterdir())
    assert choose(ClusterSpec(unified=1, transport="tcp"), tmp_path / folder).data == "tcp://127.0.0.1"


def test_tcp_ports_do_not_overlap() -> None:
    at = choose(ClusterSpec(prefill=1, decode=1, transport="tcp", controllers="per_instance"), HERE)
    base = int(at.bus.rpartition(":")[2])
    ports = [int(address.rpartition(":")[2]) for address in at.controllers.values()]
    assert ports == [base + 3, base + 5]


def test_free_ports_are_free() -> None:
    base = free_ports("127.0.0.1", 4)
    for port in range(base, base + 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_each_node_process_has_the_gpus_that_are_named_for_it() -> None:
    spec = ClusterSpec(prefill=2, decode=1, gpus=("4", "5", "0,1"), metrics_port=9000)
    visible = {name: part.env for name, part in parts(spec).items()}
    assert visible == {
        "broker": {}, "controller-0": {}, "prefill-0/0": {"CUDA_VISIBLE_DEVICES": "4"},
        "prefill-0/1": {"CUDA_VISIBLE_DEVICES": "5"}, "decode-0/0": {"CUDA_VISIBLE_DEVICES": "0,1"},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--gpus names those of 1 node processes, and there are 2"):
        parts(ClusterSpec(prefill=1, decode=1, gpus=("0",)))


def test_metrics_ports_follow_the_order_of_starting() -> None:
    made = parts(ClusterSpec(prefill=1, decode=1, metrics_port=9400, node_args=("--metrics-port", "1")))
    assert {name: part.metrics_port for name, part in made.items()} == {
        "broker": 9400, "controller-0": 9401, "prefill-0/0": 9402, "decode-0/0": 9403,
    }  # fmt: skip
    assert all(option(part, "--metrics-port")[-1] == str(part.metrics_port) for part in made.values())
    with pytest.raises(ConfigError, match="up to 65537, beyond 65535"):
        parts(ClusterSpec(prefill=1, decode=1, metrics_port=65534))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prefill": 2},
        {"prefill": 10**20, "decode": 1},
        {"prefill": 1, "decode": 1, "decode_instances": 4097},
        {"decode": 2},
        {"prefill": -1, "decode": 1},
        {"unified": 1, "ranks_per_process": 0},
        {"unified": 1, "transport": "udp"},
        {"unified": 1, "embedded": True, "controllers": "per_instance"},
        {"unified": 1, "embedded": True, "controller_args": ("--x",)},
        {"unified": 1, "embedded": True, "metrics_port": 9400},
        {"unified": 1, "metrics_port": 70_000},
    ],
)
def test_what_is_no_cluster(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_several_controllers_with_keys_are_told_apart_in_their_addresses() -> None:
    place = Path("/run/pdbus")
    spec = ClusterSpec(prefill=1, decode=1, keys="keys", controllers="per_instance")
    names = {name: base.partition("#")[2] for name, base in choose(spec, place).controllers.items()}
    assert names == {"controller-prefill-0": "controller-prefill-0", "controller-decode-0": "controller-decode-0"}
    alone = ClusterSpec(prefill=1, decode=1, keys="keys")
    assert "#" not in choose(alone, place).controllers["controller-0"]


def test_an_engines_own_arguments_come_last_behind_a_dash() -> None:
    spec = ClusterSpec(unified=1, engine="vllm", node_args=("--hold-s", "9"), engine_args=("--dtype", "float32"))
    args = parts(spec)["unified-0/0"].args
    assert args[-5:] == ("--hold-s", "9", "--", "--dtype", "float32")
    ported = parts(dataclasses.replace(spec, metrics_port=7000))["unified-0/0"]
    assert option(ported, "--metrics-port") == [str(ported.metrics_port)]
    assert ported.args[-3:] == ("--", "--dtype", "float32")


@pytest.mark.parametrize(
    ("said", "model"), [({"engine": "sim"}, "sim"), ({}, "smollm2"), ({"engine": "sim", "model": "mine"}, "mine")]
)
def test_a_cluster_of_the_sim_engine_serves_its_own_model(said: dict[str, str], model: str) -> None:
    """Its vocabulary is its own: no text of another model's tokenizer fits it."""
    assert ClusterSpec(unified=1, **said).model == model
