"""These tests need kubectl (its kustomize) and kubernetes-validate: `make test-k8s` makes an environment that has them
and names its `bin` in PDBUS_K8S. No cluster is asked for."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("PDBUS_K8S"):
        for item in items:
            if "tests/kubernetes/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="make test-k8s has kubectl and kubernetes-validate"))
