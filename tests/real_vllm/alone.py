"""One vLLM engine alone, without any of ours: what the split must equal. `alone.py CASES ANSWERS`, both JSON files.

A case may have several turns (`more`: the token ids that follow each answer): its answer is then all turns' token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(cases: str, answers: str) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(cases).read_text())
    engine = LLM(asked["model"], **asked["engine"])
    params = [SamplingParams(detokenize=False, **case["params"]) for case in asked["cases"]]

    def answered(prompts: list[list[int]]) -> list[Any]:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    prompts = [case["ids"] for case in asked["cases"]]
    said = answered(prompts)
    if "more" not in asked["cases"][0]:
        Path(answers).write_text(json.dumps([_said(each) for each in said]))
        return
    turns = [[list(each.token_ids)] for each in said]
    for number in range(len(asked["cases"][0]["more"])):
        more = [case["more"][number] for case in asked["cases"]]
        prompts = [[*ids, *each.token_ids, *new] for ids, each, new in zip(prompts, said, more, strict=True)]
        said = answered(prompts)
        for ids, each in zip(turns, said, strict=True):
            ids.append(list(each.token_ids))
    Path(answers).write_text(json.dumps(turns))


def _said(completion: Any) -> tuple[list[int], list[float]]:
    """Token ids, and how likely vLLM held each."""
    ids = list(completion.token_ids)
    return ids, [likely[token].logprob for token, likely in zip(ids, completion.logprobs, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
