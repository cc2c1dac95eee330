"""What a request is, once its arguments are checked. Owns that check; sends and keeps nothing.

Only what could not be put on the wire is refused here. Everything else (an empty prompt, a rank that does not exist, a
room out of range) is the controller's to judge, so that there is one judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from bus.errors import ConfigError
from bus.runtime.sockets import PAYLOAD_MAX
from bus.wire.hashing import block_hashes, pack_hashes, token_bytes
from bus.wire.messages import Leg, Message, Params, Submit

_M = TypeVar("_M", bound=Message)
MAX_PROMPT_TOKENS = PAYLOAD_MAX // 4 - 1024  # leaves room for the output so far, when a request is resumed


@dataclass(frozen=True, slots=True)
class LegPlan:
    """One submit: `leg` to the controller whose client endpoint is `controller`. `suffix` keeps rids apart."""

    controller: str
    leg: Leg
    suffix: str = ""
    instance: str = ""
    prefill_instance: str = ""
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """`legs[0]` is the leg whose end is the request's: it streams the tokens, unless it is a lone prefill leg."""

    prompt: bytes  # int32 little-endian
    max_tokens: int
    params: Params
    legs: tuple[LegPlan, ...]
    bootstrap_room: int | None
    model: str = ""
    deadline_s: float = 0.0
    priority: int = 0
    block_tokens: int = 0
    block_hashes: bytes = b""
    stop_ids: frozenset[int] = frozenset()  # known end tokens, beside those in `params`

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


def submit_header(plan: RequestPlan, leg: LegPlan, rid: str, attempt: int, have: int, deadline_s: float) -> Submit:
    """The header for one leg; `have` output tokens are there already and follow the prompt in its frame."""
    return Submit(
        rid=rid + leg.suffix,
        leg=leg.leg,
        prompt_tokens=plan.prompt_tokens + have,
        max_tokens=plan.max_tokens - have,
        bootstrap_room=plan.bootstrap_room,
        routed_dp_rank=leg.routed_dp_rank,
        disagg_prefill_dp_rank=leg.disagg_prefill_dp_rank,
        instance=leg.instance,
        prefill_instance=leg.prefill_instance,
        model=plan.model,
        attempt=attempt,
        offset=have,
        deadline_s=deadline_s,
        priority=plan.priority,
        block_tokens=plan.block_tokens,
        block_hashes=plan.block_hashes,
    )


def check_plan(plan: RequestPlan, rid: str) -> None:
    """ConfigError when a header of `plan` could not be put on the wire."""
    for leg in plan.legs:
        header = submit_header(plan, leg, rid, 1, 0, plan.deadline_s)
        _convert(msgspec.to_builtins(header, builtin_types=(bytes,)), Submit)


def prompt_bytes(ids: Sequence[int]) -> bytes:
    """The prompt frame; ConfigError for what is no list of token ids."""
    if len(ids) > MAX_PROMPT_TOKENS:
        raise ConfigError(f"a prompt has at most {MAX_PROMPT_TOKENS} tokens, this one has {len(ids)}")
    try:
        frame = token_bytes(ids)
    except (OverflowError, TypeError):
        raise ConfigError("token ids are integers from 0 to 2147483647") from None
    if ids and min(ids) < 0:
        raise ConfigError(f"token ids are integers from 0 to 2147483647, not {min(ids)}")
    return frame


def make_params(
    temperature: float, top_k: int, top_p: float, seed: int, stop_token_ids: Sequence[int], ignore_eos: bool
) -> Params:
    """Sampling parameters within the bounds of the protocol; ConfigError says which one is not."""
    return _convert(["params", temperature, top_k, top_p, seed, list(stop_token_ids), ignore_eos], Params)


def _convert(fields: object, kind: type[_M]) -> _M:
    try:
        return msgspec.convert(fields, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$[")
        name = ("tag", *kind.__struct_fields__)[int(path.split("]")[0])] if path else str(kind.__struct_config__.tag)
        raise ConfigError(f"{name}: {reason[0].lower()}{reason[1:]}") from None


def make_legs(
    leg: Leg | None,
    controller: str,
    prefill_controller: str,
    *,
    instance: str = "",
    prefill_instance: str = "",
    routed_dp_rank: int | None = None,
    disagg_prefill_dp_rank: int | None = None,
) -> tuple[LegPlan, ...]:
    """One submit, or two that share a room when `prefill_controller` is another one than `controller` or `leg` is None.

    The options mean the same either way: `instance` and `routed_dp_rank` are decode's, the other two are prefill's.
    """
    if leg is not None:
        return (
            LegPlan(controller, leg, "", instance, prefill_instance, routed_dp_rank, disagg_prefill_dp_rank),
        )  # fmt: skip
    return (
        LegPlan(controller, "decode", "", instance, prefill_instance, routed_dp_rank, disagg_prefill_dp_rank),
        LegPlan(prefill_controller, "prefill", ".prefill", prefill_instance, "", disagg_prefill_dp_rank),
    )


def hash_prompt(ids: Sequence[int], block_tokens: int) -> bytes:
    """`Submit.block_hashes` for a controller that is aware of prefix caches; empty with `block_tokens` 0."""
    return pack_hashes(block_hashes(ids, block_tokens)) if block_tokens else b""
