"""The manifests hold by Kubernetes' own schemas, strictly, and agree with each other and with the settings in them."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from rendered import (
    COMPONENT,
    OVERLAYS,
    PLACE,
    Way,
    component,
    container,
    kind,
    ports,
    settings,
    text_of,
    tool,
    ways,
    workloads,
)

from nodes.link.host import STREAM_GRACE_S

every = pytest.mark.parametrize("overlay", OVERLAYS)


@every
def test_they_are_valid(overlay: str, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(text_of(overlay), encoding="utf-8")
    tool(f"{os.environ['PDBUS_K8S']}/kubernetes-validate", "--strict", tmp_path / "all.yaml")


@every
def test_nothing_but_the_network_of_the_others_is_the_pods(overlay: str) -> None:
    """Pod Security's `restricted`, which the namespace asks for, and more."""
    (namespace,) = kind(overlay, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(overlay).values():
        pod, here = workload["spec"]["template"]["spec"], container(workload)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]  # or it can't read its key
        assert here["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert not pod["automountServiceAccountToken"]
        assert not pod["enableServiceLinks"]  # `PDBUS_BROKER_PORT` would be taken for a setting
        assert "memory" in here["resources"]["limits"]
        assert {"memory", "cpu"} <= here["resources"]["requests"].keys()


@every
def test_every_object_says_what_it_belongs_to(overlay: str) -> None:
    for each in (*kind(overlay, "StatefulSet"), *kind(overlay, "Service"), *kind(overlay, "PodDisruptionBudget")):
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/part-of"] == "pdbus"
        selector = each["spec"]["selector"]
        assert selector.get("matchLabels", selector)[COMPONENT] == component(each)


@every
def test_a_pod_may_take_as_long_as_its_drain(overlay: str) -> None:
    said = tomllib.loads(settings(overlay))
    drain_s = {"prefill": said["node"]["drain-s"], "decode": said["node"]["drain-s"], "edge": said["serve"]["drain-s"]}
    for name, workload in workloads(overlay).items():
        hook = container(workload).get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        needed_s = drain_s.get(name, 0) + STREAM_GRACE_S + hook["sleep"]["seconds"]
        assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed_s, name


@every
def test_a_controller_goes_when_the_edge_of_the_one_before_is_back(overlay: str) -> None:
    """That edge drains, leaves and starts meanwhile; the other one, by the controller whose turn is next, serves."""
    parts = workloads(overlay)
    leaves_s = parts["edge"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert parts["controller"]["spec"]["minReadySeconds"] >= leaves_s + 45


@every
def test_what_names_others_names_what_is_there(overlay: str) -> None:
    """Services, controllers by number, an edge for each, and no more pods than ranks."""
    parts, said = workloads(overlay), tomllib.loads(settings(overlay))
    services = {each["metadata"]["name"]: each for each in kind(overlay, "Service")}
    for workload in parts.values():
        assert workload["spec"]["serviceName"] in services
        assert workload["spec"]["podManagementPolicy"] == "Parallel"  # ready waits for the others
    for name in ("broker", "controller"):  # whose names must resolve before they are ready
        assert services[f"pdbus-{name}"]["spec"]["publishNotReadyAddresses"]
    base = ports(parts["controller"])["clients"]
    assert said["node"]["controller"] == [
        f"tcp://pdbus-controller-{index}.pdbus-controller:{base}#controller-{index}"
        for index in range(parts["controller"]["spec"]["replicas"])
    ]
    assert parts["edge"]["spec"]["replicas"] == parts["controller"]["spec"]["replicas"]
    autoscalers = {component(each): each["spec"] for each in kind(overlay, "HorizontalPodAutoscaler")}
    for role in ("prefill", "decode"):
        sized = autoscalers[role]["maxReplicas"] if role in autoscalers else parts[role]["spec"]["replicas"]
        assert sized <= said["node"]["dp-size"]
        assert ("replicas" in parts[role]["spec"]) == (role not in autoscalers)  # or each apply would undo its work


@every
def test_what_one_policy_lets_out_another_lets_in(overlay: str) -> None:
    out, into = set(ways(overlay, "egress")), set(ways(overlay, "ingress"))
    assert out == into
    assert {(way.target, way.port) for way in into} | {("edge", 8000)} == {
        (name, port) for name, workload in workloads(overlay).items() for port in ports(workload).values()
        if port != ports(workload).get("metrics")
    }  # fmt: skip


def test_the_page_has_the_ports_that_the_policies_have() -> None:
    text = (PLACE.parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\w+) \| .* \| ([a-z, ]+) \|$", text, re.M)
    told = {Way(source, target, int(port)) for port, target, sources in rows for source in sources.split(", ")}
    assert {way for way in told if way.target != "edge"} == set(ways("sim", "ingress"))


def test_autoscalers_ask_for_what_the_adapter_has() -> None:
    rules = yaml.safe_load((PLACE / "components" / "autoscaling" / "adapter-rules.yaml").read_text(encoding="utf-8"))
    made = {
        rule.get("name", {}).get("as") or re.match(r"\w+", rule["seriesQuery"])[0]  # type: ignore[index]
        for rule in rules["rules"]["custom"]
    }
    asked = {
        metric["pods"]["metric"]["name"]
        for each in kind("vllm", "HorizontalPodAutoscaler")
        for metric in each["spec"]["metrics"]
    }
    assert asked == made


def test_rdma_is_added_to_ranks_and_to_nothing_else(tmp_path: Path) -> None:
    """Beside the GPU, in pods that stay within `restricted`."""
    overlay, component_of = (os.path.relpath(PLACE / each, tmp_path) for each in ("overlays/vllm", "components/rdma"))
    said = {"resources": [overlay], "components": [component_of]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
    text = tool(f"{os.environ['PDBUS_K8S']}/kubectl", "kustomize", tmp_path)
    (tmp_path / "all.yaml").write_text(text, encoding="utf-8")
    tool(f"{os.environ['PDBUS_K8S']}/kubernetes-validate", "--strict", tmp_path / "all.yaml")
    parts = {component(each): each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet"}
    for name, before in workloads("vllm").items():
        now, old = container(parts[name]), container(before)
        if name in ("prefill", "decode"):
            assert now["resources"]["limits"].pop("rdma/rdma_shared_device_a") == "1"
            assert {"name": "UCX_LOG_LEVEL", "value": "info"} in now["env"]
            now["env"].remove({"name": "UCX_LOG_LEVEL", "value": "info"})
        assert now == old
