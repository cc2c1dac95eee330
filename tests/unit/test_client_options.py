"""What the client refuses itself, and what it leaves to the controller."""

from __future__ import annotations

from typing import Any

import pytest

from bus.errors import ConfigError
from bus.messages import RankState, RankStatus, Status
from pdbus.client.plan import make_params, prompt_bytes
from pdbus.client.settings import DEFAULT_MAX_TOKENS, Options, make_plan, model_of, where

AT = where("ipc:///tmp/pdx/c", None, None)


class Rooms:
    """What a plan needs of a channel."""

    def new_room(self) -> int:
        return 2**62 + 1

    def new_rid(self) -> str:
        return "drawn"


def plan(ids: list[int], **options: Any) -> Any:
    return make_plan(ids, Options(**options), AT, "pair", (2,), Rooms())  # type: ignore[arg-type]


def test_defaults() -> None:
    rid, made = plan([5])
    assert (rid, made.max_tokens, made.bootstrap_room, made.stop_ids) == (
        "drawn", DEFAULT_MAX_TOKENS, 2**62 + 1, frozenset({2}),
    )  # fmt: skip
    assert plan([5], leg="prefill")[1].bootstrap_room is None  # who sends a lone leg knows the room
    assert plan([5], ignore_eos=True, stop_token_ids=(7,))[1].stop_ids == frozenset({7})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"temperature": -0.5}, "temperature: expected"),
        ({"top_p": 0.0}, "top_p: expected"),
        ({"seed": -1}, "seed: expected"),
        ({"stop_token_ids": (-4,)}, "stop_token_ids: expected"),
        ({"rid": "x" * 129}, "rid: expected"),
        ({"priority": 5000}, "priority: expected"),
        ({"max_tokens": 2**63}, "max_tokens: expected"),
        ({"leg": "both"}, "leg: invalid"),
    ],
)
def test_what_cannot_be_sent_is_one_clear_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan([5], **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[-1], [2**31], ["a"], [1.5]])
def test_token_ids(ids: list[Any]) -> None:
    with pytest.raises(ConfigError, match="token ids are integers"):
        prompt_bytes(ids)


def test_the_controller_judges_the_rest() -> None:
    for options in ({"bootstrap_room": -3}, {"routed_dp_rank": 4000}, {"routed_dp_rank": -1}, {"instance": "nowhere"}):
        plan([], **options)


@pytest.mark.parametrize(
    "arguments",
    [
        (None, "ipc:///a/b", None),
        (None, None, "ipc:///a/b"),
        ("ipc:///a/c", "ipc:///a/b", "ipc:///a/b"),
        ("http://x:1", None, None),
        ("ipc://relative", None, None),
        ("tcp://host", None, None),
    ],
)
def test_addresses(arguments: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(ConfigError):
        where(*arguments)


def test_params_keep_their_bounds() -> None:
    assert make_params(1, 0, 1.0, 0, (), False).temperature == 1.0


def status_of(*ranks: tuple[str, RankState]) -> Status:
    listed = [
        RankStatus("u", n, "unified", model, state, 1, "", 0, 0.0, None, 0, 0, 0, 0, 0, 0, 0, 0)
        for n, (model, state) in enumerate(ranks)
    ]
    return Status(1, "c", 1, 0.0, {}, {}, tuple(listed))


def test_the_model_of_text_is_the_one_that_ready_ranks_serve() -> None:
    assert model_of(status_of(("old", "lost"), ("old", "draining"), ("new", "ready"))) == "new"
    assert model_of(status_of(("new", "starting"), ("gone", "gone"))) == "new"
    with pytest.raises(ConfigError, match="new, old"):
        model_of(status_of(("old", "ready"), ("new", "ready")))
    with pytest.raises(ConfigError, match="no rank has joined"):
        model_of(status_of(("old", "gone")))
