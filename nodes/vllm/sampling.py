"""A leg's sampling parameters as vLLM's `SamplingParams` takes them. Pure; it imports no vLLM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import DecodeError, json

from bus.wire.codes import Refusal
from bus.wire.messages import Params
from nodes.link.leg import Leg

KNOWN = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "logprobs",
    "bad_words", "allowed_token_ids", "cache_salt",
)  # fmt: skip
UNIFIED = ("prompt_logprobs",)  # of one engine that has the whole prompt
REASONING = ("reasoning_ended", "reasoning_parser_kwargs")  # with a reasoning parser
THINKING = ("thinking_token_budget",)  # where vLLM knows the marks of reasoning
NOT_SPECULATING = ("min_p", "logit_bias")  # vLLM refuses them where it speculates
GRAMMARS = {
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag", "choice": "choice",
}  # fmt: skip  # and what vLLM calls them
_OF_THE_OUTPUT = {"presence_penalty", "frequency_penalty", *THINKING, *GRAMMARS}
_PASSED = {*KNOWN, *UNIFIED, *THINKING} - {"cache_salt"}  # as arguments of these names

# What it takes for a prompt's KV cache to stay when its request is over, until a decode engine has fetched it.
HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What it takes at a decode engine for those of a request that it computes itself to stay, until they are read back.
PIN = {"do_remote_decode": False, "do_remote_prefill": False}
READ_UNTIL = "pdbus_read_until"  # our own: when what a handle reads may be another prompt's, by `time.perf_counter`


def arguments(leg: Leg, handle: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return keyword arguments for `SamplingParams`; Refusal for what this leg cannot honour. `handle` is from the
    engine of the other leg (None: the prompt is computed here), or PIN. The stop ids are all in `leg.stop_ids`, so vLLM
    need not know the model's own; structured outputs stay arguments of `StructuredOutputsParams`, under their own
    names."""
    if leg.role == "prefill":
        extra = {"kv_transfer_params": HAND_OVER | (handle or {})}
        return {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "extra_args": extra}
    found = decoding(leg)
    if handle is not None:
        found["extra_args"] = {"kv_transfer_params": handle}
    return found


def decoding(leg: Leg) -> dict[str, Any]:
    """Return the arguments of the leg that decodes, of this request; Refusal as for `arguments`."""
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
    return found


def reasoning(leg: Leg, known: Collection[str]) -> dict[str, Any]:
    """Return the arguments of `generate` that say where a model's reasoning is; Refusal for kwargs that are no JSON
    object. A resumed leg has none: its reasoning may have ended in the output so far. Where the caller names no parser,
    and `known`, the rank's parameters, says that it has one, a grammar is for the whole output."""
    params = leg.params
    if leg.role == "prefill" or leg.offset:
        return {}
    found: dict[str, Any] = {}
    if params.reasoning_ended is not None:
        found["reasoning_ended"] = params.reasoning_ended
    elif not params.reasoning_parser and "reasoning_ended" in known and not GRAMMARS.keys().isdisjoint(params.needs):
        found["reasoning_ended"] = True
    if params.reasoning_parser_kwargs:
        try:
            found["reasoning_parser_kwargs"] = json.decode(params.reasoning_parser_kwargs, type=dict[str, Any])
        except (DecodeError, RecursionError) as error:
            raise Refusal("bad_request", f"reasoning_parser_kwargs: {error}") from None
    return found


def check_ids(params: Params, vocab_size: int) -> None:
    """Refusal for token ids outside the vocabulary: vLLM would index its logits with those of bad words unchecked."""
    if any(token >= vocab_size for word in params.bad_words for token in word):
        raise Refusal("bad_request", f"bad_words: a token id outside 0..{vocab_size - 1}")


def _further(params: Params, offset: int) -> dict[str, Any]:
    """Return further arguments. A resumed leg's prompt ends with the output so far, which vLLM takes for a part of
    the prompt: parameters that depend on the output alone would start again, so they are refused."""
    needs = set(params.needs)
    if offset and any(len(word) > 1 for word in params.bad_words):
        raise Refusal(
            "bad_request", "an output with bad_words of several tokens can't be resumed; ask for all of it again"
        )
    if offset and (lost := sorted(needs & _OF_THE_OUTPUT)):
        raise Refusal("bad_request", f"an output with {', '.join(lost)} can't be resumed; ask for all of it again")
    found: dict[str, Any] = {name: getattr(params, name) for name in needs if name in _PASSED}
    if "min_tokens" in found:
        found["min_tokens"] = max(0, params.min_tokens - offset)
    if "logit_bias" in found:
        found["logit_bias"] = dict(params.logit_bias)
    if "bad_words" in found:
        found["bad_words"] = [list(word) for word in params.bad_words]
    if "allowed_token_ids" in found:
        found["allowed_token_ids"] = list(params.allowed_token_ids)
    if offset:
        found.pop("prompt_logprobs", None)  # they came with the first token
    grammars = {theirs: getattr(params, ours) for ours, theirs in GRAMMARS.items() if ours in needs}
    if len(grammars) > 1:
        raise Refusal("bad_request", "of json_schema, regex, ebnf, structural_tag and choice one at most")
    if params.choice:
        grammars["choice"] = list(params.choice)
    return found | ({"structured_outputs": grammars} if grammars else {})
