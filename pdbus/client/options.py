"""How a client is set up and how a request's options become a plan; shared by the sync and the async client.

Owns names, defaults and their meaning; sends and keeps nothing. Only what could not be put on the wire is refused here.
Everything else (an empty prompt, a rank that does not exist, a room out of range) is the controller's to judge, so that
there is one judge.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import msgspec

from bus.endpoints import ControllerAddress, default_controller
from bus.errors import ConfigError
from bus.runtime.sockets import PAYLOAD_MAX
from bus.wire.hashing import block_hashes, pack_hashes, token_bytes
from bus.wire.messages import Leg, Message, Params, Status, Submit
from pdbus.client.channel import Channel
from pdbus.client.request import LegPlan, Patience, RequestPlan, submit_header

DEFAULT_MAX_TOKENS = 128
_M = TypeVar("_M", bound=Message)
MAX_PROMPT_TOKENS = PAYLOAD_MAX // 4 - 1024  # leaves room for the output so far, when a request is resumed


@dataclass(frozen=True, slots=True)
class Where:
    """The controllers: one for everything, or one for each leg of a pair (both get the same room)."""

    decode: str
    prefill: str | None

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


def where(controller: str | None, prefill_controller: str | None, decode_controller: str | None) -> Where:
    """ConfigError unless one is named, or both, or none (the default address)."""
    if (prefill_controller is None) != (decode_controller is None):
        raise ConfigError("prefill_controller and decode_controller go together")
    if prefill_controller is None or decode_controller is None:
        return Where(ControllerAddress(controller or default_controller()).clients, None)
    if controller is not None:
        raise ConfigError("give either controller, or prefill_controller and decode_controller")
    return Where(ControllerAddress(decode_controller).clients, ControllerAddress(prefill_controller).clients)


class Options(TypedDict, total=False):
    """What `generate` takes beside the prompt.

    Sampling: `max_tokens`, `temperature` (0: greedy), `top_k` (0: off), `top_p`, `seed` (default: drawn),
    `stop_token_ids`, `ignore_eos`. Placement: `leg` (default: a pair, or unified where no rank splits), `instance` and
    `routed_dp_rank` of the leg that decodes (or of the only leg), `prefill_instance` and `disagg_prefill_dp_rank` of
    prefill, `bootstrap_room` (default: drawn). Others: `deadline_s`, `priority`, `rid` (default: drawn), `model`,
    `block_tokens` (send hashes of prompt blocks of this size, for `cache_aware`; default: of the ranks' size where the
    controller says that it uses them; 0: none).
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    leg: Leg
    instance: str
    prefill_instance: str
    routed_dp_rank: int | None
    disagg_prefill_dp_rank: int | None
    bootstrap_room: int | None
    deadline_s: float
    priority: int
    rid: str
    model: str
    block_tokens: int


def check_options(given: Iterable[str]) -> None:
    """TypeError that names the first option which `Options` has not, and the one that is likely meant."""
    for name in given:
        if name in Options.__annotations__:
            continue
        longer = [known for known in Options.__annotations__ if known.startswith(f"{name}_")]
        near = longer or difflib.get_close_matches(name, Options.__annotations__, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(Options.__annotations__)}"
        raise TypeError(f"a request has no option {name!r}; {hint}")


def check_text(text: object) -> None:
    """TypeError for what is no text, such as a list of chat messages."""
    if not isinstance(text, str):
        raise TypeError(
            f"generate takes the user's text as one str, not a {type(text).__name__} "
            "(system=... is the system message; token ids go to generate_tokens)"
        )


def make_plan(
    ids: Sequence[int],
    options: Options,
    at: Where,
    default_leg: Leg,
    eos_ids: Sequence[int],
    channel: Channel,
    default_block_tokens: int = 0,
) -> tuple[str, RequestPlan]:
    """The rid and plan of a request; ConfigError when the options cannot be meant."""
    max_tokens = options.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, not {max_tokens}")
    deadline_s = options.get("deadline_s", 0.0)
    if not 0 <= deadline_s < math.inf:
        raise ConfigError(f"deadline_s must be a number of seconds (0: none), not {deadline_s:g}")
    leg = options.get("leg")
    if at.prefill is not None and leg not in (None, "pair"):
        raise ConfigError("with a controller for each leg, a request is a pair")
    legs = make_legs(
        leg or default_leg if at.prefill is None else None,
        at.decode,
        at.prefill or "",
        instance=options.get("instance", ""),
        prefill_instance=options.get("prefill_instance", ""),
        routed_dp_rank=options.get("routed_dp_rank"),
        disagg_prefill_dp_rank=options.get("disagg_prefill_dp_rank"),
    )
    room = options.get("bootstrap_room")
    if room is None and (at.prefill is not None or legs[0].leg in ("pair", "unified")):
        room = channel.new_room()
    params = make_params(
        options.get("temperature", 0.0),
        options.get("top_k", 0),
        options.get("top_p", 1.0),
        options["seed"] if "seed" in options else channel.new_room() >> 31,
        options.get("stop_token_ids", ()),
        options.get("ignore_eos", False),
    )
    block_tokens = options.get("block_tokens", default_block_tokens)
    plan = RequestPlan(
        prompt=prompt_bytes(ids),
        max_tokens=max_tokens,
        params=params,
        legs=legs,
        bootstrap_room=room,
        model=options.get("model", ""),
        deadline_s=deadline_s,
        priority=options.get("priority", 0),
        block_tokens=block_tokens,
        block_hashes=hash_prompt(ids, block_tokens),
        stop_ids=frozenset(() if params.ignore_eos else eos_ids) | frozenset(params.stop_token_ids),
    )
    rid = options.get("rid") or channel.new_rid()
    check_plan(plan, rid)
    return rid, plan


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


def leg_for(status: Status) -> Leg | None:
    """`unified` where all ranks are, else `pair`; None while there are no ranks to tell from."""
    roles = {rank.role for rank in status.ranks if rank.state != "gone"}
    if not roles:
        return None
    return "unified" if roles == {"unified"} else "pair"


def block_tokens_for(status: Status) -> int:
    """The block size to hash prompts with; 0 where no method in force looks at hashes, or ranks differ in it."""
    sizes = {rank.block_tokens for rank in status.ranks if rank.role in status.uses_hashes and rank.state != "gone"}
    return sizes.pop() if len(sizes) == 1 else 0


def model_of(status: Status) -> str:
    """The one model that ready ranks serve, or all ranks while none is ready; ConfigError when there is none yet, or
    several."""
    ready = {rank.model for rank in status.ranks if rank.state == "ready"}
    models = sorted(ready or {rank.model for rank in status.ranks if rank.state != "gone"})
    if not models:
        raise ConfigError("no rank has joined this controller yet, so the model is unknown; start nodes, or try again")
    if len(models) > 1:
        raise ConfigError(f"several models are served ({', '.join(models)}); say which one: model=...")
    return models[0]


def patience(retries: int, connect_timeout_s: float) -> Patience:
    if retries < 0 or not 0 < connect_timeout_s < math.inf:
        raise ConfigError("retries must be at least 0, and connect_timeout_s a number of seconds above 0")
    return Patience(retries, connect_timeout_s)
