"""The manifests of examples/kubernetes as kubectl renders them, and what a reader of them asks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PLACE = Path(__file__).parents[2] / "examples" / "kubernetes"
OVERLAYS = ("sim", "vllm")
COMPONENT = "app.kubernetes.io/component"
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
Object = dict[str, Any]


class Way(NamedTuple):
    """Pods of one component may connect to those of another, or do."""

    source: str
    target: str
    port: int


def tool(name: str, *arguments: str | Path) -> str:
    """What a program of the tests' environment prints, or a failure that shows all of it."""
    path = f"{os.environ['PDBUS_K8S']}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([name, *arguments], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} {arguments}: {done.stdout}{done.stderr}"
    return done.stdout


@cache
def text_of(overlay: str) -> str:
    return tool(f"{os.environ['PDBUS_K8S']}/kubectl", "kustomize", PLACE / "overlays" / overlay)


@cache
def objects(overlay: str) -> list[Object]:
    return list(yaml.safe_load_all(text_of(overlay)))


def kind(overlay: str, name: str) -> list[Object]:
    return [each for each in objects(overlay) if each["kind"] == name]


def component(each: Object) -> str:
    return str(each["metadata"]["labels"][COMPONENT])


def workloads(overlay: str) -> dict[str, Object]:
    return {component(each): each for each in kind(overlay, "StatefulSet")}


def container(workload: Object) -> Object:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def ports(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def settings(overlay: str) -> str:
    """The file of settings that all pods read."""
    (made,) = (each for each in kind(overlay, "ConfigMap") if each["metadata"]["name"].startswith("pdbus-settings-"))
    return str(made["data"]["pdbus.toml"])


def ways(overlay: str, direction: str) -> Iterator[Way]:
    """What the policies of the components let in (`ingress`) or out (`egress`), among the components."""
    towards = "from" if direction == "ingress" else "to"
    for policy in kind(overlay, "NetworkPolicy"):
        here = policy["spec"]["podSelector"].get("matchLabels", {}).get(COMPONENT)
        for rule in policy["spec"].get(direction, ()):
            for peer in rule.get(towards, ()):
                there = peer.get("podSelector", {}).get("matchLabels", {}).get(COMPONENT)
                if here and there:
                    ends = (there, here) if direction == "ingress" else (here, there)
                    yield from (Way(*ends, port["port"]) for port in rule["ports"])
