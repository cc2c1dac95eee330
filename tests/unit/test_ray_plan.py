"""`pdbus up --ray`, before anything is placed: what goes where, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bus.errors import ConfigError
from pdbus.cli import pdbus
from pdbus.launcher.spec import Addresses, ClusterSpec
from pdbus.ray.plan import HEAD, RAY, Group, addresses, at, environment, groups, machines, parse_resources

HERE = Addresses("tcp://10.0.0.1:5550", {"controller-0": "tcp://10.0.0.1:5560"}, "tcp://0.0.0.0")


def ray_node(ip: str, *, head: bool = False, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 4.0, f"node:{ip}": 1.0} | ({HEAD: 1.0} if head else {})
    name = f"host-{ip[-1]}"
    return {"NodeID": f"id-{ip}", "NodeManagerAddress": ip, "NodeManagerHostname": name, "Alive": alive,
            "Resources": resources}  # fmt: skip


KNOWN = machines([ray_node("10.0.0.2"), ray_node("10.0.0.1", head=True), ray_node("10.0.0.3", alive=False)])


def test_each_instance_is_a_group_and_a_process_needs_what_its_ranks_need() -> None:
    spec = ClusterSpec(prefill=3, decode=1, prefill_instances=2, ranks_per_process=2)
    needs = {"prefill": {"CPU": 2.0, "GPU": 1.0}, "decode": {"GPU": 0.5}, "unified": {"CPU": 1.0}}
    made = groups(spec, spec.parts(HERE), needs)
    assert [group.instance for group in made] == ["prefill-0", "prefill-1", "decode-0"]
    assert made[0] == Group(
        "prefill-0", ("prefill-0/0-1", "prefill-0/2"), ({"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 1.0})
    )
    assert made[1].parts == ("prefill-1/0-1", "prefill-1/2")
    assert made[2] == Group("decode-0", ("decode-0/0",), ({"GPU": 0.5},))
    assert made[0].label == "prefill-0 (2 x CPU=2,GPU=1, CPU=4,GPU=2)"


def test_instances_whose_names_begin_alike_are_told_apart() -> None:
    spec = ClusterSpec(unified=1, unified_instances=11)
    made = groups(spec, spec.parts(HERE), {"unified": {"CPU": 1.0}})
    assert [group.parts for group in made] == [(f"unified-{n}/0",) for n in range(11)]


def test_resources() -> None:
    assert parse_resources("--x", "CPU=4, GPU=0.5,accelerator_type:H100=0.001") == {
        "CPU": 4.0, "GPU": 0.5, "accelerator_type:H100": 0.001,
    }  # fmt: skip
    for wrong in ("", "CPU", "CPU=", "=1", "CPU=x", "CPU=0", "CPU=-1", "CPU=nan", "CPU=inf", "CPU=1,,GPU=1"):
        with pytest.raises(ConfigError, match=r"--x .*: give amounts above 0, as in CPU=4,GPU=1"):
            parse_resources("--x", wrong)


def test_broker_and_controller_are_bound_at_the_head_or_where_an_address_says() -> None:
    assert [machine.ip for machine in KNOWN] == ["10.0.0.1", "10.0.0.2"], "the head first, none that is dead"
    usual = addresses(ClusterSpec(unified=1), KNOWN)
    assert (usual.bus, usual.controllers) == ("tcp://10.0.0.1:5550", {"controller-0": "tcp://10.0.0.1:5560"})
    said = addresses(ClusterSpec(unified=1, bus="tcp://10.0.0.2:7000", controller="tcp://host-2:7100"), KNOWN)
    assert (said.bus, said.controllers["controller-0"]) == ("tcp://10.0.0.2:7000", "tcp://host-2:7100")
    assert at("", KNOWN).is_head
    assert at(said.bus, KNOWN) == at(said.controllers["controller-0"], KNOWN) == KNOWN[1]
    for wrong in ("tcp://10.0.0.3:7000", "ipc:///tmp/bus", "nonsense"):
        with pytest.raises(ConfigError, match=r"no Ray node has that address; there are 10.0.0.1 \(head\), 10.0.0.2"):
            at(wrong, KNOWN)


def test_parts_have_the_settings_of_this_environment_but_not_its_files() -> None:
    theirs = {"PDBUS_NODE_HOLD_S": "9", "PDBUS_METRICS_HOST": "0.0.0.0", "PDBUS_DECODE_KV_TOKENS": "4096"}
    mine = {"PDBUS_DIR": "/run/x", "PDBUS_KEYS": "keys", "PDBUS_CONFIG": "a.toml", "PDBUS_UP_RAY": "true", "HOME": "/"}
    assert environment(theirs | mine) == theirs


def test_the_extra_is_what_a_user_is_told_to_install() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["ray"] == [RAY]
    assert RAY in (Path(__file__).parents[1] / "real_ray" / "pins.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "0,1,2,3"), "--gpus: with --ray, Ray gives out GPUs: --prefill-resources GPU=1"),
        (("--decode-resources", "GPU"), "--decode-resources 'GPU': give amounts above 0"),
        (("--front", "vllm", "--http", "8000"), "--front vllm: with --ray there is the light edge; start `pdbus serve"),
        ((), f"--ray needs the Python package 'ray'; run: pip install {RAY}"),
    ],
)
def test_what_is_refused_before_ray_is_asked(
    arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdbus.commands.up.find_spec", lambda name: None)
    done = CliRunner().invoke(pdbus, ["up", "--ray", "--model", "sim", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
