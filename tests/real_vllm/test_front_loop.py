"""Loops of tool calls, by unmodified clients with streaming, through an unmodified `vllm serve` with its plugin, in
front of a prefill and a decode rank of real vLLM: they equal those through `vllm serve` over an engine of its own.

A small model knows no tools, so the clients say what is called (`tool_choice`), and a grammar makes the calls: the
structural tag that vLLM makes of a forced choice, on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from forced_clients import CLIENTS
from front_server import Front, unmodified
from loops import SERVER, check, loop
from real_engines import BLOCK, ENGINE, ENV, cluster_of

from nodes.vllm.smollm2 import hugging_face

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The loops through vLLM's server over its own engine, which has left."""
    arguments = (*SERVER, *ENGINE, "--block-size", str(BLOCK))
    with unmodified(hugging_face(), tmp_path_factory.mktemp("alone"), *arguments, **ENV) as served:
        assert engine_cores(served)
        return {client: loop(client, served) for client in CLIENTS}


@pytest.fixture(scope="module")
def served(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """The same over the bus. It starts after the engine alone, since two cores are not enough for three engines."""
    folder = tmp_path_factory.mktemp("bus")
    with (
        cluster_of(1, folder) as cluster,
        unmodified(hugging_face(), folder, *SERVER, PDBUS_VLLM_CONTROLLER=cluster.controller) as made,
    ):
        yield made


def engine_cores(served: Front) -> list[str]:
    """The names of its processes that are engine cores."""
    return [name for each in served.family() if "EngineCore" in (name := " ".join([each.name(), *each.cmdline()]))]


@pytest.mark.parametrize("client", list(CLIENTS))
def test_a_loop_equals_that_of_one_engine_alone(alone: dict[str, Any], served: Front, client: str) -> None:
    found = loop(client, served)
    check(found)
    assert found == alone[client]


def test_no_engine_core_was_started(served: Front) -> None:
    assert engine_cores(served) == []
