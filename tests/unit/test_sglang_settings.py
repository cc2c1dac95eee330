"""The plugin's settings and addresses, from environment variables and bootstrap addresses."""

from __future__ import annotations

import pytest

from bus.errors import ConfigError
from pdbus.sglang import addresses
from pdbus.sglang.settings import read


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"PDBUS_SGLANG": "on"}, True),
        ({"PDBUS_SGLANG_METHOD": "total_tokens"}, True),
        ({"PDBUS_SGLANG_METHOD": "total_tokens", "PDBUS_SGLANG": "off"}, False),
        ({"PDBUS_SGLANG_BUS": "tcp://h:1"}, False),
    ],
)
def test_it_is_on_when_asked_for_and_off_otherwise(environ: dict[str, str], on: bool) -> None:
    assert read(environ).on is on


def test_nothing_is_checked_while_it_is_off() -> None:
    assert not read({"PDBUS_SGLANG": "off", "PDBUS_SGLANG_BUS": "nonsense"}).on


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PDBUS_SGLANG", "perhaps", "give on or off"),
        ("PDBUS_SGLANG_HTTP", "2", "give on or off"),
        ("PDBUS_SGLANG_BUS", "127.0.0.1:5550", "starts with ipc:// or tcp://"),
        ("PDBUS_SGLANG_INSTANCE", "a b", "a name has 1 to 64"),
        ("PDBUS_SGLANG_NONCE", "-1", "a whole number"),
        ("PDBUS_SGLANG_ROOM_S", "soon", "seconds"),
        ("PDBUS_SGLANG_CACHE_WEIGHT", "-1", "a number, between 0 and 1000"),
        ("PDBUS_SGLANG_CACHE_WEIGHT", "nan", "a number"),
        ("PDBUS_SGLANG_LOST_S", "4", "between 5 and 86400"),
        ("PDBUS_SGLANG_KEYS", "/keys", "needs PDBUS_SGLANG_INSTANCE"),
    ],
)
def test_what_makes_no_sense_is_one_line(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read({"PDBUS_SGLANG_METHOD": "total_tokens", name: value})
    assert "\n" not in str(error.value)
    assert name in str(error.value) or name == "PDBUS_SGLANG_BUS"


def test_a_server_is_named_by_its_start_unless_told() -> None:
    assert read({"PDBUS_SGLANG": "on", "PDBUS_SGLANG_NONCE": "255"}).name == "sglang-00000000000000ff"
    assert read({"PDBUS_SGLANG": "on", "PDBUS_SGLANG_INSTANCE": "p0"}).name == "p0"


@pytest.mark.parametrize(
    ("bootstrap", "bus"),
    [
        ("10.0.0.1:8998", "tcp://10.0.0.1:9098"),
        ("prefill.example:8998", "tcp://prefill.example:9098"),
        ("[fd00::1]:8998", "tcp://[fd00::1]:9098"),
    ],
)
def test_a_bootstrap_address_tells_the_bus(bootstrap: str, bus: str) -> None:
    assert addresses.beside(bootstrap) == bus


@pytest.mark.parametrize(
    ("host", "near", "bound"),
    [
        ("0.0.0.0", "tcp://127.0.0.1:9098", "tcp://0.0.0.0:9098"),
        ("::", "tcp://[::1]:9098", "tcp://[::]:9098"),
        ("127.0.0.1", "tcp://127.0.0.1:9098", "tcp://127.0.0.1:9098"),
        ("[::1]", "tcp://[::1]:9098", "tcp://[::1]:9098"),
        ("here", "tcp://here:9098", "tcp://10.1.2.3:9098"),
    ],
)
def test_wildcards_are_bound_and_met_at_home(host: str, near: str, bound: str) -> None:
    assert addresses.near(host, 8998) == near
    assert addresses.to_bind(host, 8998, lambda name: {"here": "10.1.2.3"}[name]) == bound


def test_a_port_too_high_for_a_bus_above_it_is_said() -> None:
    with pytest.raises(ConfigError, match="100 ports above the bootstrap server"):
        addresses.beside("10.0.0.1:65500")
