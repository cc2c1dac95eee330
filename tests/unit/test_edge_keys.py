"""Bearer keys: the file, its quotas, and that it is read again."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest
from edge_world import World, chat, ended, letters

from bus.errors import ConfigError
from pdbus.edge.errors import HttpError
from pdbus.edge.keys import Key, Keys


def write(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_who_has_a_key_may_and_who_has_none_may_not(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-bobs-key").hexdigest()
    path = write(tmp_path / "keys", f'[alice]\nkey = "sk-alices-key"\n[bob]\nsha256 = "{digest}"\n')
    world = World(api_keys=path)
    for said, status in (
        ("Bearer sk-alices-key", 200),
        ("bearer  sk-bobs-key ", 200),
        ("Bearer sk-eves-key", 401),
        ("Basic sk-alices-key", 401),
        ("", 401),
    ):
        answer = asyncio.run(world.post("/v1/chat/completions", chat(), headers={"authorization": said}))
        assert answer.status == status, said
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["code"] == "invalid_api_key"
    for path in ("/v1/models", "/load"):
        assert asyncio.run(world.get(path)).status == 401
    for path in ("/health", "/ready", "/metrics", "/docs", "/"):
        assert asyncio.run(world.get(path)).status == 200


def test_quotas(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\nrequests_per_minute = 2\ntokens_per_minute = 1000\n')
    world = World(api_keys=path)
    said = {"authorization": "Bearer sk-12345"}

    def ask() -> tuple[int, str | None]:
        answer = asyncio.run(world.post("/v1/chat/completions", chat(), headers=said))
        return answer.status, answer.headers.get("retry-after-ms")

    assert [ask(), ask(), ask()] == [(200, None), (200, None), (429, "30000")]
    world.now += 30
    assert [ask(), ask()] == [(200, None), (429, "30000")]


def test_a_key_has_a_class_of_slo_and_a_request_may_name_another(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\nslo_class = "batch"\n[b]\nkey = "sk-67890"\n')
    world = World(api_keys=path)
    for key, header in (("sk-12345", {}), ("sk-12345", {"x-slo-class": "interactive"}), ("sk-67890", {})):
        headers = {"authorization": f"Bearer {key}"} | header
        assert asyncio.run(world.post("/v1/chat/completions", chat(), headers=headers)).status == 200
    assert [options["slo_class"] for _, options in world.client.asked] == ["batch", "interactive", ""]
    answer = asyncio.run(world.post("/v1/chat/completions", chat(), headers=headers | {"x-slo-class": "x" * 33}))
    assert (answer.status, answer.error["param"]) == (400, "x-slo-class")


def test_tokens_are_charged_when_they_are_known() -> None:
    key = Key("a", tokens_per_minute=60)
    key.enter(0.0)
    key.leave(180)
    with pytest.raises(HttpError) as refused:
        key.enter(0.0)
    assert refused.value.retry_after_s == pytest.approx(121), "what was overdrawn is made good first"
    key.enter(121.0)


def test_requests_in_flight_are_counted_until_they_end() -> None:
    key = Key("a", requests_in_flight=1)
    key.enter(0.0)
    with pytest.raises(HttpError):
        key.enter(0.0)
    key.leave(5)
    key.enter(0.0)


def test_what_the_cluster_refuses_costs_no_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\ntokens_per_minute = 2\n')
    world = World(lambda ids, o: [ended(o["rid"], "failed", code="overloaded")], api_keys=path)
    said = {"authorization": "Bearer sk-12345"}
    for _ in range(3):
        answer = asyncio.run(world.post("/v1/completions", {"prompt": "many tokens"}, headers=said))
        assert (answer.status, answer.error["code"]) == (429, "overloaded")


def test_a_request_that_fails_gives_its_place_back(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\nrequests_in_flight = 1\n')
    world = World(letters("x"), api_keys=path)
    said = {"authorization": "Bearer sk-12345"}
    for _ in range(3):
        assert asyncio.run(world.post("/v1/chat/completions", chat(temperature=-1), headers=said)).status == 400
    assert asyncio.run(world.post("/v1/chat/completions", chat(), headers=said)).status == 200


def test_the_file_is_read_again_and_who_stayed_keeps_what_they_used(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, '[a]\nkey = "sk-aaaaa"\nrequests_per_minute = 5\n')
    keys = Keys(str(path))
    alice = keys.find(b"Bearer sk-aaaaa")
    assert alice is not None
    write(path, '[a]\nkey = "sk-aaaaa-new"\nrequests_per_minute = 5\n[b]\nkey = "sk-bbbbb"\n')
    os.utime(path, ns=(1, 1))
    keys.refresh()
    assert keys.find(b"Bearer sk-aaaaa") is None
    assert keys.find(b"Bearer sk-aaaaa-new") is alice
    assert keys.find(b"Bearer sk-bbbbb") is not None
    write(path, "[a\n")
    os.utime(path, ns=(2, 2))
    keys.refresh()
    assert keys.find(b"Bearer sk-bbbbb") is not None, "a file that makes no sense changes nothing"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("[a", "is no TOML"),
        ('key = "sk-12345"', "outside of a"),
        ("[a]", "needs key"),
        ('[a]\nkey = "short"', "needs key"),
        ('[a]\nsha256 = "xyz"', "needs key"),
        ('[a]\nkey = "sk-12345"\nrate = 1', "has 'rate'"),
        ('[a]\nkey = "sk-12345"\nrequests_in_flight = -1', "must be whole numbers"),
        ('[a]\nkey = "sk-12345"\nslo_class = 1', "is a name of at most 32"),
        ('[a]\nkey = "sk-12345"\n[b]\nkey = "sk-12345"', r"has the key of \[a\]"),
    ],
)
def test_what_is_no_file_of_keys(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Keys(write(tmp_path / "keys", text))


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "keys", '[a]\nkey = "sk-12345"\n')
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys(str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot read"):
        Keys(str(tmp_path / "none"))
