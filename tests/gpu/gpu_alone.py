"""One vLLM engine alone, with the parser, the defaults and the context of `vllm serve`, and nothing of ours between:
what it decides, and what it answers. `gpu_alone.py ASKED SAID`, both JSON files."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def answers(engine: Any, cases: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    said = {}
    for name, case in cases.items():
        params = dict(case["params"])
        if "json_schema" in params:
            params["structured_outputs"] = StructuredOutputsParams(json=params.pop("json_schema"))
        sampling = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params)
        async for output in engine.generate(tokens_input(case["ids"]), sampling, name):
            (completion,) = output.outputs
        ids = list(completion.token_ids)
        top = [{token: it.logprob for token, it in each.items()} for each in completion.logprobs or ()]
        said[name] = {
            "ids": ids, "top": top, "text": completion.text,
            "logprobs": [each[token] for token, each in zip(ids, top, strict=False)],
        }  # fmt: skip
    return said


async def main(asked: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    given = make_arg_parser(FlexibleArgumentParser()).parse_args([*asked["arguments"], "--model", asked["model"]])
    args = AsyncEngineArgs.from_cli_args(given)
    engine = AsyncLLM.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)
    try:
        config = engine.vllm_config
        scheduler = config.scheduler_config
        facts = {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "kv_cache_size_tokens": config.cache_config.kv_cache_size_tokens,
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
            "async_scheduling": bool(scheduler.async_scheduling),
        }
        return {"facts": facts, "answers": await answers(engine, asked["cases"])}
    finally:
        engine.shutdown()


if __name__ == "__main__":
    said = asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(said))
