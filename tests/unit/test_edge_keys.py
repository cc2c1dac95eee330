"""Bearer keys: the file, its quotas, and that it is read again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tomllib
from pathlib import Path

import pytest
from docs_commands import ROOT, blocks
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


def test_the_edges_page_shows_such_a_file(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks(ROOT / "docs" / "edge.md") if block.info == "toml"]
    key = Keys(write(tmp_path / "keys", text)).find(b"Bearer sk-choose-your-own")
    assert key is not None
    shown = tomllib.loads(text)["alice"]
    assert {"requests_in_flight", "requests_per_minute", "tokens_per_minute", "slo_class"} < shown.keys()
    assert all(getattr(key, name) == value for name, value in shown.items() if name != "key")


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


def test_two_keys_have_no_session_in_common(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\n["b/c"]\nkey = "sk-67890"\n')
    world = World(api_keys=path)
    for key in ("sk-12345", "sk-67890"):
        headers = {"authorization": f"Bearer {key}", "x-session-id": "s"}
        assert asyncio.run(world.post("/v1/chat/completions", chat(), headers=headers)).status == 200
    assert [options["session"] for _, options in world.client.asked] == ["a/s", "b%2Fc/s"]


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
    key.charge(180)
    key.leave()
    with pytest.raises(HttpError) as refused:
        key.enter(0.0)
    assert refused.value.retry_after_s == pytest.approx(121), "what was overdrawn is made good first"
    key.enter(121.0)


def test_requests_in_flight_are_counted_until_they_end() -> None:
    key = Key("a", requests_in_flight=1)
    key.enter(0.0)
    with pytest.raises(HttpError):
        key.enter(0.0)
    key.leave()
    key.enter(0.0)


def test_each_answer_counts_as_a_request(tmp_path: Path) -> None:
    """Under way and a minute; what neither limit could ever admit is no matter of waiting."""
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\nrequests_in_flight = 4\nrequests_per_minute = 8\n')
    world = World(api_keys=path)
    said = {"authorization": "Bearer sk-12345"}

    def ask(n: int, prompts: int = 1) -> tuple[int, str | None]:
        answer = asyncio.run(world.post("/v1/completions", {"prompt": ["x"] * prompts, "n": n}, headers=said))
        return answer.status, answer.headers.get("retry-after-ms")

    assert [ask(5), ask(3, 2)] == [(400, None), (400, None)]
    world.now += 60.0
    assert [ask(4), ask(1, 3), ask(2)] == [(200, None), (200, None), (429, "7500")]
    key = Key("a", requests_in_flight=4)
    key.enter(0.0, 3)
    with pytest.raises(HttpError) as refused:
        key.enter(0.0, 2)
    assert refused.value.status == 429
    assert key.in_flight == 3
    key.leave(3)
    key.enter(0.0, 4)


def test_texts_and_ids_count_as_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\nrequests_per_minute = 2\n')
    world = World(api_keys=path)
    said = {"authorization": "Bearer sk-12345"}
    asked = ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})
    assert [asyncio.run(world.post(*each, headers=said)).status for each in asked] == [200, 200]
    for each in asked:
        assert asyncio.run(world.post(*each, headers=said)).status == 429


PROMPT = 9  # tokens
WHO_PAYS: list[tuple[list[object], int | None, int]] = [  # what each try brings, when the client leaves, what it costs
    ([{"finish": "failed", "code": "overloaded"}], None, 0),
    ([{"finish": "failed", "code": "too_long"}], None, 0),
    ([{"finish": "failed", "code": "no_rank", "ran": True}], None, PROMPT),
    ([{"finish": "failed", "code": "peer_lost", "ran": True}], None, PROMPT),
    ([(5,), (6,), {"finish": "failed", "code": "overloaded"}], None, PROMPT + 2),
    ([(5,), (6,), {"finish": "stop"}], None, PROMPT + 2),
    ([{"finish": "cancelled", "ran": True}], 0, PROMPT),
    ([{"finish": "cancelled"}], 0, 0),  # while it waited
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "leave_after", "tokens"), WHO_PAYS)
def test_a_prompt_that_a_rank_had_is_charged_whoever_leaves(
    tmp_path: Path, script: list[object], leave_after: int | None, tokens: int, stream: bool
) -> None:
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\ntokens_per_minute = 1000\n')
    world = World(
        lambda ids, o: [ended(o["rid"], **each) if isinstance(each, dict) else each for each in script],  # type: ignore[misc]
        api_keys=path,
    )
    said = {"authorization": "Bearer sk-12345"}
    body = {"prompt": "x" * PROMPT, "stream": stream}
    asyncio.run(world.post("/v1/completions", body, headers=said, leave_after=leave_after))
    (key,) = world.edge._keys._keys.values()  # type: ignore[union-attr]
    assert 1000 - key._tokens.left == tokens
    assert key.in_flight == 0


def test_a_prompt_is_charged_once_and_given_back_by_itself(tmp_path: Path) -> None:
    """Whatever its answers; of two prompts the first is refused, and of the answers to the other one runs."""
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\ntokens_per_minute = 1000\n')
    world = World(
        lambda ids, o: [ended(o["rid"], "failed", code="overloaded", ran=o["rid"].endswith("-3"))], api_keys=path
    )
    said = {"authorization": "Bearer sk-12345"}
    asyncio.run(world.post("/v1/completions", {"prompt": ["x" * 5, "y" * 7], "n": 2}, headers=said))
    (key,) = world.edge._keys._keys.values()  # type: ignore[union-attr]
    assert 1000 - key._tokens.left == 7


def test_a_prompt_counts_while_it_is_worked_on(tmp_path: Path) -> None:
    """Not only at the end: who sends many at once has none of them for nothing."""
    path = write(tmp_path / "keys", '[a]\nkey = "sk-12345"\ntokens_per_minute = 10\n')
    world = World(lambda ids, o: [], api_keys=path)
    said = {"authorization": "Bearer sk-12345"}

    async def ask() -> int:
        first = asyncio.create_task(world.post("/v1/completions", {"prompt": "x" * 20}, headers=said))
        while not world.client.asked:
            await asyncio.sleep(0)
        status = (await world.post("/v1/completions", {"prompt": "y"}, headers=said)).status
        first.cancel()
        await asyncio.wait([first])
        return status

    assert asyncio.run(ask()) == 429


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
