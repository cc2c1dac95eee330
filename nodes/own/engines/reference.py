"""The answer of a single process, one request and no bus: the reference with which tests and the demo compare every
split run."""

from __future__ import annotations

from collections.abc import Sequence

from bus.wire.messages import Params
from nodes.own.engines.base import Row
from nodes.own.engines.cache import Progress, no_progress
from nodes.own.engines.factory import load_llama
from nodes.own.engines.sim import SIM_VOCAB_SIZE, sim_generate

BLOCK_TOKENS = 16
GREEDY = Params()


def generate_alone(
    model: str,
    prompt_ids: Sequence[int],
    max_tokens: int,
    params: Params = GREEDY,
    *,
    engine: str = "torch",
    vocab_size: int = SIM_VOCAB_SIZE,
    progress: Progress = no_progress,
) -> list[int]:
    """Return up to `max_tokens` tokens after `prompt_ids`, without the prompt; a stop token ends the output and is its
    last token. It blocks while it loads and computes.

    It uses the same model code and sampling as the engine, torch or numpy, on the calling thread; `vocab_size` is for
    sim.
    """
    if engine == "sim":
        return _until_stop(sim_generate(prompt_ids, max_tokens, vocab_size), set(params.stop_token_ids))

    llama, _ = load_llama(engine, model, progress)
    import numpy  # known to be there

    from nodes.own.engines.sampling import sample

    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(llama.config.eos_ids))
    blocks = -(-(len(prompt_ids) + max_tokens) // BLOCK_TOKENS)
    pool = llama.new_pool(blocks, BLOCK_TOKENS)
    table = range(blocks)
    fed, start, output = list(prompt_ids), 0, list[int]()
    while len(output) < max_tokens and not (output and output[-1] in stops):
        logits = llama.forward(pool, [Row(0, fed, start, table, params, len(output))])
        start += len(fed)
        fed = sample(numpy.asarray(logits), [(params, len(output))])
        output += fed
    return output


def _until_stop(output: list[int], stops: set[int]) -> list[int]:
    ends = [index for index, token in enumerate(output) if token in stops]
    return output[: ends[0] + 1] if ends else output
