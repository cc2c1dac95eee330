"""One vLLM engine alone, without any of ours: what the split must equal. `alone.py CASES ANSWERS`, both JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(cases: str, answers: str) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(cases).read_text())
    engine = LLM(asked["model"], **asked["engine"])
    prompts = [{"prompt_token_ids": case["ids"]} for case in asked["cases"]]
    params = [SamplingParams(detokenize=False, **case["params"]) for case in asked["cases"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    Path(answers).write_text(json.dumps([_said(output.outputs[0]) for output in outputs]))


def _said(completion: Any) -> tuple[list[int], list[float]]:
    """Token ids, and how likely vLLM held each."""
    ids = list(completion.token_ids)
    return ids, [likely[token].logprob for token, likely in zip(ids, completion.logprobs, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
