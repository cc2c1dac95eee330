"""One cluster over nine hosts for all tests of a process, whole and idle before each. `make test-netns` runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_rig import Rig
from hosts_world import World
from netns import unable


@pytest.fixture(scope="session")
def able() -> None:
    if why := unable():
        pytest.skip(why)


@pytest.fixture(scope="session")
def whole(able: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def world(whole: World, rig: Rig, other: Rig) -> World:
    for each in (rig, other):
        each.idle()
    return whole


@pytest.fixture
def rig(whole: World) -> Iterator[Rig]:
    """A client of controller-0."""
    made = whole.rig("controller-0")
    yield made
    made.channel.stop()


@pytest.fixture
def other(whole: World) -> Iterator[Rig]:
    """A client of controller-1."""
    made = whole.rig("controller-1")
    yield made
    made.channel.stop()
