"""One vLLM engine alone, without any of ours: what the split must equal. `alone.py CASES ANSWERS`, both JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(cases: str, answers: str) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(cases).read_text())
    engine = LLM(asked["model"], **asked["engine"])
    prompts = [{"prompt_token_ids": case["ids"]} for case in asked["cases"]]
    params = [SamplingParams(detokenize=False, **case["params"]) for case in asked["cases"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    Path(answers).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
