"""The arguments of a caller: the controllers of a client, and the options of a request, which become its record. A leg
is one rank's share of a request (prefill, decode, or both: unified); the two legs of a pair find each other by their
room, a number.

Owns names, defaults and their meaning, and what a client reads from a status; sends and keeps nothing. It refuses only
what cannot be put on the wire. Everything else (an empty prompt, a rank that does not exist, a room out of range) is
checked by the controller, so that there is one place for it.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from bus.endpoints import ControllerAddress, default_controller
from bus.errors import ConfigError
from bus.runtime.sockets import PAYLOAD_MAX
from bus.tracecontext import parse
from bus.wire.codec import encode
from bus.wire.hashing import ROOT, packed_hashes, root_of, token_bytes
from bus.wire.messages import (
    MAX_LOGPROBS_PER_MESSAGE,
    OPTIONAL_PARAMS,
    Legs,
    Message,
    Params,
    Role,
    Status,
    Submit,
)
from pdbus.client.core import Patience
from pdbus.client.request import Request

DEFAULT_MAX_TOKENS = 128
MAX_CHOICES = 4096  # as many requests as a controller takes of one client
_M = TypeVar("_M", bound=Message)
MAX_PROMPT_TOKENS = PAYLOAD_MAX // 4 - 1024  # leaves space for the output so far when a request is resumed


@dataclass(frozen=True, slots=True)
class Controllers:
    """The client endpoints of a client's controllers: one for everything, or one for each leg of a pair (both get the
    same room). `prefill` None: there is one controller, `decode`."""

    decode: str
    prefill: str | None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints, that of decode first."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


def controllers_of(
    controller: str | None, prefill_controller: str | None, decode_controller: str | None
) -> Controllers:
    """Return the endpoints of the controllers with these base addresses: one, or one for each leg, or none (then the
    default address). Raises ConfigError for another combination or a wrong address."""
    if (prefill_controller is None) != (decode_controller is None):
        raise ConfigError("prefill_controller and decode_controller go together")
    if prefill_controller is None or decode_controller is None:
        return Controllers(ControllerAddress(controller or default_controller()).clients, None)
    if controller is not None:
        raise ConfigError("give either controller, or prefill_controller and decode_controller")
    return Controllers(ControllerAddress(decode_controller).clients, ControllerAddress(prefill_controller).clients)


class Options(TypedDict, total=False):
    """The options of a request, which `generate` takes beside the prompt.

    Sampling: `max_tokens` (at least 1; default 128), `temperature` (0, the default: greedy), `top_k` (0: off), `top_p`
    (above 0, to 1), `seed` (default: drawn), `stop_token_ids` (at most 64), `ignore_eos`; and these, which go only to
    ranks that know them: `min_p`, `presence_penalty`, `frequency_penalty`, `repetition_penalty`, `min_tokens`,
    `logit_bias` (by token id), `logprobs` (0 to 20: the natural log probability of each output token, and those of so
    many of the most likely tokens at its place), `prompt_logprobs` (the same of the prompt, of 2,049 tokens at most;
    unified ranks alone), `bad_words` (token ids that the output must not have in a row, for each word),
    `allowed_token_ids` (the output has no others), `cache_salt` (KV caches are shared only among requests with the same
    one), at most one of `json_schema`, `regex`, `ebnf`, `structural_tag` (these in the engine's dialect) and `choice`
    (texts), and for models that reason `thinking_token_budget`, `reasoning_parser` (only ranks with this parser get the
    request, and a grammar begins behind the reasoning), `reasoning_ended` and `reasoning_parser_kwargs` (a JSON
    object). With penalties of the output, bad words of several tokens, a grammar or a thinking budget, an interrupted
    output cannot be resumed: the request fails. Placement: `leg` (default: a pair, or unified where there are no
    prefill and decode ranks), `instance` and `routed_dp_rank` of the leg that decodes (or of the only leg),
    `prefill_instance` and `disagg_prefill_dp_rank` of prefill, `bootstrap_room` (0 to 2^63 - 1; default: drawn).
    Others: `deadline_s` (seconds from the submit; 0: none), `ttft_slo_s` (the first token is wanted within it; 0: the
    controller's own; used where its queue order is `slo`), `tpot_slo_s` (the same for each further token), `slo_class`
    (a name, known to the controller, for both limits), `priority` (-1000 to 1000, higher first), `rid` (at most 128
    characters; default: drawn), `model`, `block_tokens` (send hashes of prompt blocks of this size, for `cache_aware`;
    default: the ranks' block size where the controller uses hashes; 0: none), `traceparent` and `tracestate` (W3C Trace
    Context: the parent of the spans that controller and ranks export; default: no spans), `continue_on_disconnect` (run
    to the end even if this client is gone and the output is not read), `session` (at most 256 characters: what the
    requests of one conversation have in common, for policies).
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    logit_bias: Mapping[int, float]
    json_schema: str
    regex: str
    ebnf: str
    logprobs: int
    structural_tag: str
    choice: Sequence[str]
    bad_words: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    cache_salt: str
    reasoning_parser: str
    reasoning_ended: bool | None
    reasoning_parser_kwargs: str
    thinking_token_budget: int
    prompt_logprobs: int
    leg: Legs
    instance: str
    prefill_instance: str
    routed_dp_rank: int | None
    disagg_prefill_dp_rank: int | None
    bootstrap_room: int | None
    deadline_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    slo_class: str
    priority: int
    rid: str
    model: str
    block_tokens: int
    continue_on_disconnect: bool
    traceparent: str
    tracestate: str
    session: str


_KNOWN = Options.__annotations__.keys()
_OF_PARAMS = _KNOWN & set(Params.__struct_fields__)
_OF_SUBMIT = _KNOWN & set(Submit.__struct_fields__) - {
    "rid", "leg", "max_tokens", "block_tokens",
}  # fmt: skip
_OPTIONAL_PARAMS = frozenset(name for name, _ in OPTIONAL_PARAMS) | {"reasoning_parser"}


def check_options(given: Mapping[str, object]) -> None:
    """Raise TypeError for an option that does not exist; the message suggests the one that is likely meant."""
    if given.keys() <= _KNOWN:
        return
    for name in given:
        if name in _KNOWN:
            continue
        longer = [known for known in Options.__annotations__ if known.startswith(f"{name}_")]
        near = longer or difflib.get_close_matches(name, Options.__annotations__, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(Options.__annotations__)}"
        raise TypeError(f"a request has no option {name!r}; {hint}")


def choices(n: int, **options: Unpack[Options]) -> list[Options]:
    """Return the options of `n` requests for `n` answers to one prompt: a copy of `options` for each, each with its own
    `seed` and `rid` where `options` has these. Raises ConfigError for options that several requests cannot share."""
    check_options(options)
    if not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise ConfigError(f"n: 1 to {MAX_CHOICES} answers, not {n!r}")
    if n > 1 and options.get("bootstrap_room") is not None:
        raise ConfigError("bootstrap_room: a room is one request's; ask for one answer")
    made = [options.copy() for _ in range(n)]
    for number, each in enumerate(made if n > 1 else ()):
        if "seed" in each:
            each["seed"] += number
        if each.get("rid"):
            each["rid"] += f"-{number}"
    return made


def check_text(text: object) -> None:
    """Raise TypeError for an argument that is not a str, such as a list of chat messages."""
    if not isinstance(text, str):
        raise TypeError(
            f"generate takes the user's text as one str, not a {type(text).__name__} "
            "(system=... is the system message; token ids go to generate_tokens)"
        )


def make_request(
    ids: Sequence[int],
    options: Options,
    at: Controllers,
    rng: random.Random,
    *,
    leg: Legs = "pair",
    block_tokens: int = 0,
    eos_ids: Sequence[int] = (),
    asked_us: int = 0,
) -> Request:
    """Return the request for the prompt `ids`, not yet submitted. Raises ConfigError for invalid options; option names
    must have been checked.

    `leg` and `block_tokens` are the defaults of these options, `eos_ids` the tokens that end the output, `asked_us` the
    time of the call (microseconds since 1970). `rng` draws room, seed and rid where `options` has none. `at` with two
    controllers gives a submit for each.
    """
    max_tokens = options.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, not {max_tokens}")
    deadline_s = options.get("deadline_s", 0.0)
    if not 0 <= deadline_s < math.inf:
        raise ConfigError(f"deadline_s must be a number of seconds (0: none), not {deadline_s:g}")
    if "ttft_slo_s" in options:
        _check_slo("ttft_slo_s", options["ttft_slo_s"])
    if "tpot_slo_s" in options:
        _check_slo("tpot_slo_s", options["tpot_slo_s"])
    if at.prefill is None:
        leg = options.get("leg") or leg
    elif options.get("leg") not in (None, "pair"):
        raise ConfigError("with a controller for each leg, a request is a pair")
    prompt = prompt_bytes(ids)
    placed: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OF_PARAMS:
            sampling[name] = value
        elif name in _OF_SUBMIT:
            placed[name] = value
    if placed.get("bootstrap_room") is None and (at.prefill is not None or leg in ("pair", "unified")):
        placed["bootstrap_room"] = rng.getrandbits(63)
    if "seed" not in sampling:
        sampling["seed"], sampling["seed_drawn"] = rng.getrandbits(32), True
    if "stop_token_ids" in sampling:
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    plain = sampling.keys().isdisjoint(_OPTIONAL_PARAMS)
    if not plain:
        _make_tuples(sampling)
    if traceparent := options.get("traceparent"):
        placed["trace"] = trace = parse(traceparent, options.get("tracestate", ""))
        if trace is None:
            raise ConfigError(f"traceparent: {traceparent!r:.80} is none, as in 00-<32 digits>-<16 digits>-01")
    params, params_frame = _checked(Params(**sampling))
    root = ROOT if plain else root_of(params.cache_salt)
    block_tokens = options.get("block_tokens", block_tokens)
    header = Submit(
        rid=options.get("rid") or f"{rng.getrandbits(64):016x}",
        leg="decode" if at.prefill is not None else leg,
        prompt_tokens=len(ids),
        max_tokens=max_tokens,
        block_tokens=block_tokens,
        block_hashes=packed_hashes(prompt, block_tokens, root) if block_tokens else b"",
        asked_us=asked_us,
        needs=() if plain else params.needs,
        **placed,
    )
    submits = {(at.decode, header.rid): _checked(header)[0]}
    if at.prefill is not None:
        prefill = _of_prefill(header)
        submits[at.prefill, prefill.rid] = _checked(prefill)[0]
    request = Request(
        rid=header.rid,
        submits=submits,
        prompt=prompt,
        params=params_frame,
        stop_ids=frozenset(() if params.ignore_eos else eos_ids) | frozenset(params.stop_token_ids),
        wants_logprobs=params.logprobs >= 0,
    )
    if not plain and params.prompt_logprobs >= 0:
        _check_prompt_logprobs(len(ids), leg)
        request.prompt_logprobs = () if len(ids) > 1 else None
    return request


def _check_slo(name: str, slo_s: float) -> None:
    if not 0 <= slo_s < math.inf:
        raise ConfigError(f"{name} must be a number of seconds (0: the controller's own), not {slo_s:g}")


def _make_tuples(sampling: dict[str, Any]) -> None:
    """Turn lists and mappings of optional parameters into tuples, as messages have them."""
    for name in ("choice", "allowed_token_ids"):
        if name in sampling:
            sampling[name] = tuple(sampling[name])
    if "bad_words" in sampling:
        sampling["bad_words"] = tuple(map(tuple, sampling["bad_words"]))
    if "logit_bias" in sampling:
        sampling["logit_bias"] = tuple(sampling["logit_bias"].items())


def _check_prompt_logprobs(tokens: int, leg: Legs) -> None:
    """Raise ConfigError where no rank can send them: they are one message of a rank that has the whole prompt."""
    if leg != "unified":
        raise ConfigError(f"prompt_logprobs: unified ranks alone have them, and this request is a {leg}")
    if tokens - 1 > MAX_LOGPROBS_PER_MESSAGE:
        raise ConfigError(
            f"prompt_logprobs: of a prompt of {MAX_LOGPROBS_PER_MESSAGE + 1} tokens at most, not {tokens}"
        )


def _of_prefill(decode: Submit) -> Submit:
    """Return the second submit of a pair at two controllers. It has a rid of its own, as one controller may get
    both."""
    return msgspec.structs.replace(
        decode,
        rid=f"{decode.rid}.prefill",
        leg="prefill",
        instance=decode.prefill_instance,
        prefill_instance="",
        routed_dp_rank=decode.disagg_prefill_dp_rank,
        disagg_prefill_dp_rank=None,
    )


def prompt_bytes(ids: Sequence[int]) -> bytes:
    """Return the prompt frame: int32 little-endian. Raises ConfigError for anything but token ids, or for more than
    MAX_PROMPT_TOKENS."""
    if len(ids) > MAX_PROMPT_TOKENS:
        raise ConfigError(f"a prompt has at most {MAX_PROMPT_TOKENS} tokens, this one has {len(ids)}")
    try:
        frame = token_bytes(ids)
    except ValueError:
        raise ConfigError("token ids are integers from 0 to 2147483647") from None
    if not frame[3::4].isascii():  # an id has its highest bit set; this check is much faster than min()
        raise ConfigError(f"token ids are integers from 0 to 2147483647, not {min(ids)}")
    return frame


def _checked(message: _M) -> tuple[_M, bytes]:
    """Return `message`, checked against the types and bounds of the protocol, and its frame. Raises ConfigError that
    names the field."""
    kind = type(message)
    tag = str(kind.__struct_config__.tag)
    try:
        checked = msgspec.convert((tag, *msgspec.structs.astuple(message)), kind, builtin_types=(bytes,))
        frame = encode(checked)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$[")
        name = (tag, *kind.__struct_fields__)[int(path.split("]")[0])] if path else tag
        raise ConfigError(f"{name}: {reason[0].lower()}{reason[1:]}") from None
    except (OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(f"{_unfit(message)}: {error}") from None
    return checked, frame


def _unfit(message: Message) -> str:
    """Return the field that MessagePack cannot encode: an integer beyond 64 bits, or half a surrogate pair."""
    for name in message.__struct_fields__:
        try:
            msgspec.msgpack.encode(getattr(message, name))
        except (OverflowError, UnicodeEncodeError):
            return name
    raise AssertionError


def any_rank(status: Status) -> bool:
    """Return true if a rank has joined the controller and has not left."""
    return any(rank.state != "gone" for rank in status.ranks)


def leg_for(status: Status) -> Legs | None:
    """Return what the ready ranks can run: `pair` with ranks of both roles, else `unified`. While no rank is ready,
    those that have joined decide. Return None while they can run neither."""
    ready = {rank.role for rank in status.ranks if rank.state == "ready"}
    return _leg_of(ready) or _leg_of({rank.role for rank in status.ranks if rank.state != "gone"})


def _leg_of(roles: set[Role]) -> Legs | None:
    if roles >= {"prefill", "decode"}:
        return "pair"
    return "unified" if "unified" in roles else None


def block_tokens_for(status: Status) -> int:
    """Return the block size (tokens) for hashes of prompts; 0 (send none) where no balancing method uses hashes, or
    where ranks differ in it."""
    sizes = {rank.block_tokens for rank in status.ranks if rank.role in status.uses_hashes and rank.state != "gone"}
    return sizes.pop() if len(sizes) == 1 else 0


def model_of(status: Status) -> str:
    """Return the one model of the ready ranks (of all ranks while none is ready). Raises ConfigError for none or
    several."""
    ready = {rank.model for rank in status.ranks if rank.state == "ready"}
    models = sorted(ready or {rank.model for rank in status.ranks if rank.state != "gone"})
    if not models:
        raise ConfigError("no rank has joined this controller yet, so the model is unknown; start nodes, or try again")
    if len(models) > 1:
        raise ConfigError(f"several models are served ({', '.join(models)}); say which one: model=...")
    return models[0]


def patience(
    retries: int, connect_timeout_s: float, overloaded_s: float = math.inf, no_rank_s: float = math.inf
) -> Patience:
    """Return the limits of a client's retries. Raises ConfigError for values out of range."""
    if retries < 0 or not 0 < connect_timeout_s < math.inf:
        raise ConfigError("retries must be at least 0, and connect_timeout_s a number of seconds above 0")
    if not (overloaded_s >= 0 and no_rank_s >= 0):
        raise ConfigError("overloaded_s and no_rank_s must be numbers of seconds from 0 on")
    return Patience(retries, connect_timeout_s, overloaded_s, no_rank_s)
