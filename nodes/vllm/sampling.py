"""A leg's sampling parameters as vLLM's `SamplingParams` takes them. Pure; it imports no vLLM."""

from __future__ import annotations

from typing import Any

from bus.wire.codes import Refusal
from bus.wire.messages import Params
from nodes.link.leg import Leg

KNOWN = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "logprobs")
NOT_SPECULATING = ("min_p", "logit_bias")  # vLLM refuses them where it speculates
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # and what vLLM calls them
_OF_THE_OUTPUT = {"presence_penalty", "frequency_penalty", *GRAMMARS}

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
    """Return keyword arguments for `SamplingParams`; Refusal for what this leg cannot honour. `handle` is from the
    prefill engine (None: the prompt is computed here). The stop ids are all in `leg.stop_ids`, so vLLM need not know
    the model's own; structured outputs stay arguments of `StructuredOutputsParams`, under their own names."""
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
    if params.temperature > 0 and not params.seed_drawn:  # one makes vLLM sample its whole batch the slow way
        found["seed"] = (params.seed + leg.offset) % 2**63  # a resumed output must not draw the same numbers again
    if params.needs:
        found |= _further(params, leg.offset)
    if handle is not None:
        found["extra_args"] = {"kv_transfer_params": handle}
    return found


def _further(params: Params, offset: int) -> dict[str, Any]:
    """Return further arguments. A resumed leg's prompt ends with the output so far, which vLLM takes for a part of
    the prompt: parameters that depend on the output alone would start again, so they are refused."""
    needs = set(params.needs)
    if offset and (lost := sorted(needs & _OF_THE_OUTPUT)):
        raise Refusal("bad_request", f"an output with {', '.join(lost)} can't be resumed; ask for all of it again")
    found: dict[str, Any] = {name: getattr(params, name) for name in KNOWN if name in needs}
    if "min_tokens" in found:
        found["min_tokens"] = max(0, params.min_tokens - offset)
    if "logit_bias" in found:
        found["logit_bias"] = dict(params.logit_bias)
    grammars = {theirs: getattr(params, ours) for ours, theirs in GRAMMARS.items() if ours in needs}
    if len(grammars) > 1:
        raise Refusal("bad_request", "of json_schema, regex and ebnf one at most")
    return found | ({"structured_outputs": grammars} if grammars else {})
