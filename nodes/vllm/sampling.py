"""A leg's sampling parameters as vLLM's `SamplingParams` takes them. Pure; imports no vLLM."""

from __future__ import annotations

from typing import Any

from nodes.link.leg import Leg

# What it takes for a prompt's KV cache to stay when its request is over, until a decode engine has fetched it.
HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def arguments(leg: Leg, handle: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments for `SamplingParams`; Refusal for what this leg can't honour. `handle` is what a prefill engine
    handed over. The stop ids are all in `leg.stop_ids`, so vLLM need not know the model's own."""
    if leg.role == "prefill":
        extra = {"kv_transfer_params": dict(HAND_OVER)}
        return {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "extra_args": extra}
    params = leg.params
    found: dict[str, Any] = {
        "max_tokens": leg.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "stop_token_ids": sorted(leg.stop_ids),
        "ignore_eos": True,
        "detokenize": False,
    }
    if params.temperature > 0:
        found["seed"] = (params.seed + leg.offset) % 2**63  # a resumed output must not draw the same numbers again
    if handle is not None:
        found["extra_args"] = {"kv_transfer_params": handle}
    return found
