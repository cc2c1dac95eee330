"""What a dispatch must be to become a leg. Owns the checks on header and payload; keeps no state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from bus.errors import RemoteProtocolError
from bus.wire.codec import decode
from bus.wire.hashing import tokens_of
from bus.wire.messages import PARAMS, Code, Dispatch, Params, Role
from nodes.link.leg import NO_ROOM, Leg, LegState
from nodes.own.engines.base import EngineSpec


class Rejected(Exception):
    """The dispatch is turned down: `code` for programs, `sentence` for people."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code: Code = code
        self.sentence = sentence


def check(
    dispatch: Dispatch, frames: Sequence[bytes], *, role: Role, dp_rank: int, spec: EngineSpec, now: float
) -> Leg:
    """The leg that `dispatch` asks for, or Rejected. `frames` are those after the header."""
    if dispatch.leg != role:
        raise Rejected("bad_request", f"a {dispatch.leg} leg for a {role} rank")
    if dispatch.dp_rank != dp_rank:
        raise Rejected("bad_rank", f"a leg for dp_rank {dispatch.dp_rank} came to {dp_rank}")
    if dispatch.prompt_tokens < 1:
        raise Rejected("empty_prompt", "the prompt is empty")
    if dispatch.max_tokens < 1:
        raise Rejected("bad_request", "max_tokens must be at least 1")
    if role != "unified" and dispatch.bootstrap_room is None:
        raise Rejected("bad_room", f"a {role} leg needs a bootstrap_room")
    _check_length(dispatch, role, spec)
    prompt, params = _payload(dispatch, frames, role, spec)
    stop_ids = frozenset(params.stop_token_ids)
    return Leg(
        rid=dispatch.rid,
        attempt=dispatch.attempt,
        kind=role,
        owner=0,
        seq=0,
        room=NO_ROOM if dispatch.bootstrap_room is None or role == "unified" else dispatch.bootstrap_room,
        prompt=prompt,
        prompt_tokens=dispatch.prompt_tokens,
        max_tokens=dispatch.max_tokens,
        offset=dispatch.offset,
        priority=dispatch.priority,
        params=params,
        state=LegState.LOCATING if role == "decode" else LegState.SCHEDULED,
        began=now,
        deadline=now + dispatch.deadline_s if dispatch.deadline_s else None,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | frozenset(spec.eos_ids),
        prefill_instance=dispatch.prefill_instance,
    )


def _check_length(dispatch: Dispatch, role: Role, spec: EngineSpec) -> None:
    context = dispatch.prompt_tokens + (1 if role == "prefill" else dispatch.max_tokens)
    if context > spec.max_context:
        raise Rejected("too_long", f"{context} tokens exceed the context of {spec.max_context}")
    kv_tokens = context - 1  # the last token's KV is never needed
    if -(-kv_tokens // spec.block_tokens) > spec.blocks:
        raise Rejected("too_long", f"{kv_tokens} tokens exceed this rank's KV capacity of {spec.kv_capacity}")


def _payload(dispatch: Dispatch, frames: Sequence[bytes], role: Role, spec: EngineSpec) -> tuple[array[int], Params]:
    expected = 1 if role == "decode" else 2
    if len(frames) != expected:
        raise Rejected("bad_message", f"{len(frames)} payload frames, not {expected}")
    try:
        params = decode(frames[-1], PARAMS)
    except RemoteProtocolError as error:
        raise Rejected("bad_message", f"sampling parameters: {error}") from None
    assert isinstance(params, Params)
    if role == "decode":
        return array("i"), params
    if len(frames[0]) != 4 * dispatch.prompt_tokens:
        raise Rejected("bad_message", f"{len(frames[0])} prompt bytes for {dispatch.prompt_tokens} tokens")
    prompt = tokens_of(frames[0])
    if min(prompt) < 0 or max(prompt) >= spec.vocab_size:
        raise Rejected("bad_message", f"a token id outside 0..{spec.vocab_size - 1}")
    return prompt, params
