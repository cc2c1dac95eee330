"""A unified rank of real vLLM on a CPU, with the parameters that few engines know: structured outputs, words and tokens
that must not come, salts, and the prompt's log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from real_engines import ENGINE, ENV, WAIT_S

from bus.errors import ConfigError, RequestFailed
from pdbus.client import Client, Options
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.text.models import text_for

pytestmark = pytest.mark.timeout(900)

TEXT = text_for("smollm2")
PROMPT = TEXT.chat([{"role": "user", "content": "What is the capital of France?"}])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    spec = ClusterSpec(
        unified=1, engine="vllm", model="smollm2", start_timeout_s=WAIT_S, engine_args=ENGINE, env=ENV,
        log_dir=str(tmp_path_factory.mktemp("logs")),
    )  # fmt: skip
    with Cluster(spec) as cluster, cluster.client() as made:
        yield made


def ids(client: Client, max_tokens: int = 12, **options: object) -> list[int]:
    chosen: Options = {"max_tokens": max_tokens, "stop_token_ids": list(TEXT.eos_ids), **options}  # type: ignore[typeddict-item]
    return client.generate_tokens(PROMPT, **chosen).tokens()


def text_of(output: list[int]) -> str:
    return TEXT.decode([token for token in output if token not in TEXT.eos_ids])


def test_an_output_is_one_of_the_choices(client: Client) -> None:
    assert text_of(ids(client, choice=["Berlin", "Rome"])) in ("Berlin", "Rome")


def test_a_structural_tag_is_kept(client: Client) -> None:
    """It is what a forced tool call becomes."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    call = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<call>", "content": call, "end": "</call>"}}
    output = text_of(ids(client, 40, structural_tag=json.dumps(tag)))
    assert output.startswith("<call>")
    assert output.endswith("</call>")
    assert json.loads(output[len("<call>") : -len("</call>")]) == {"city": "Rome"}
    with pytest.raises(RequestFailed) as failed:
        ids(client, structural_tag="{")
    assert failed.value.code == "bad_request"


def test_words_that_must_not_come_do_not(client: Client) -> None:
    free = ids(client)
    first = ids(client, bad_words=[free[:1]])
    assert free[0] not in first
    pair = ids(client, bad_words=[free[1:3]])
    assert (pair[:2], pair[2] != free[2]) == (free[:2], True), "the first of the two may come"
    allowed = sorted({*free[1:5], *TEXT.eos_ids})
    assert set(ids(client, allowed_token_ids=allowed)) <= set(allowed)


def test_a_prompts_own_log_probabilities_come_with_it(client: Client) -> None:
    stream = client.generate_tokens(PROMPT, max_tokens=2, logprobs=1, prompt_logprobs=1)
    stream.tokens()
    found = stream.result.prompt_logprobs
    assert len(found) == len(PROMPT) - 1
    assert all(each.rank >= 1 and each.logprob <= each.top[0][1] for each in found)
    assert any(each.top[0][0] == token for each, token in zip(found, PROMPT[1:], strict=True)), (
        "some were the likeliest"
    )
    assert stream.result.logprobs[0].rank == 1
    with pytest.raises(ConfigError, match="of a prompt of 2049 tokens at most"):
        client.generate_tokens(PROMPT * 80, max_tokens=1, prompt_logprobs=0)


def test_two_salts_share_no_prefix(client: Client) -> None:
    prompt = TEXT.encode("A ship sails over the wide sea at night, and no one knows where it goes. " * 8)

    def cached(**salt: str) -> int:
        stream = client.generate_tokens(prompt, max_tokens=1, **salt)  # type: ignore[arg-type]
        stream.tokens()
        return stream.result.cached_tokens

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert min(cached(), cached(cache_salt="a"), cached(cache_salt="b")) >= 64
    counts = client.status().counts
    assert "kv_blocks_unnamed" not in counts


def test_a_parser_that_the_rank_has_not_is_refused_by_name(client: Client) -> None:
    with pytest.raises(RequestFailed, match="parser:qwen3") as failed:
        ids(client, reasoning_parser="qwen3", json_schema="{}")
    assert failed.value.code == "bad_request"
