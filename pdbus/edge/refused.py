"""Fields of requests that are not supported, and so refused by name: each with the values that ask for nothing.

The one place to change when a parameter becomes real: take its line out here, and give it its type in `fields.Sampling`
under the name of the client's option.
"""

from __future__ import annotations

REFUSED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1),
    "lora_path": (None,),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),  # of tools, which are refused
    "prediction": (None,),
    "priority": (None, 0),  # engines disagree about its direction: see the header x-request-priority
    "prompt_logprobs": (None, 0),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}  # fmt: skip
REFUSED_BY_GENERATE: dict[str, tuple[object, ...]] = {  # SGLang's names
    "audio_data": (None,),
    "custom_logit_processor": (None,),
    "data_parallel_rank": (None,),  # today's name is routed_dp_rank
    "ebnf": (None,),
    "image_data": (None,),
    "input_embeds": (None,),
    "json_schema": (None,),
    "log_metrics": (None, True, False),
    "logprob_start_len": (None, -1),
    "lora_path": (None,),
    "modalities": (None, []),
    "n": (None, 1),  # stands in sampling_params
    "no_stop_trim": (None, False),
    "priority": (None, 0),
    "regex": (None,),
    "return_hidden_states": (None, False),
    "return_logprob": (None, False),
    "return_text_in_logprobs": (None, False),
    "session_params": (None,),
    "structural_tag": (None,),
    "token_ids_logprob": (None,),
    "top_logprobs_num": (None, 0),
    "video_data": (None,),
}  # fmt: skip
