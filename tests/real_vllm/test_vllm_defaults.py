"""The engine that the node asks for, beside the one that `vllm serve` makes of the same arguments: every field that is
decided before a device is opened. Only the device's name and memory are made up.

Not compared, as a device decides it: the number of KV blocks, attention backends, CUDA graphs' sizes where memory is
short, and what a platform other than this machine's sets in the whole configuration.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import vllm.engine.arg_utils as arg_utils
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from nodes.vllm import versions
from nodes.vllm.smollm2 import hugging_face

GIB = 1 << 30
DEVICES = {
    "H100": (80, "NVIDIA H100 80GB HBM3", 8192, 1024), "H200": (141, "NVIDIA H200", 8192, 1024),
    "B200": (180, "NVIDIA B200", 16384, 1024), "A100": (40, "NVIDIA A100-SXM4-40GB", 2048, 256),
}  # fmt: skip
HEADS = '{"num_attention_heads": 8, "num_key_value_heads": 2}'  # SmolLM2's can't be halved
OURS = {"dtype": "float32", "max-model-len": "2048", "hf-overrides": HEADS}
USERS = {"max-num-batched-tokens": "3000", "max-num-seqs": "77", "gpu-memory-utilization": "0.4", "seed": "5"}
CHOSEN = (".served_model_name", ".kv_events_config", ".instance_id", "data_parallel_master_port")  # or drawn


class Device:
    """A platform, as `EngineArgs.get_batch_defaults` sees it."""

    def __init__(self, gib: int, name: str) -> None:
        self.gib, self.name = gib, name

    def get_device_total_memory(self) -> int:
        return self.gib * GIB

    def get_device_name(self) -> str:
        return self.name

    def is_cpu(self) -> bool:
        return False

    is_tpu = is_xpu = is_cpu


def flat(value: Any, path: str, found: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    if is_dataclass(value) and depth < 6:
        for field in fields(value):
            if hasattr(value, field.name):
                flat(getattr(value, field.name), f"{path}.{field.name}", found, depth + 1)
    elif not callable(value):
        found[path] = value if isinstance(value, bool | int | float | str | None) else repr(value)
    return found


def said_by(arguments: list[str], parallel: int, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the node asks for, and what `vllm serve` does."""
    path = str(hugging_face())
    choices = versions.Choices(
        role="unified", ranks=ranks, engine_id="x", host="127.0.0.1", side_port=0, events_port=0, lease_s=60
    )
    arguments = [*arguments, "--tensor-parallel-size", str(parallel)]
    ours = versions.engine_args(path, "m", arguments, choices).create_engine_config(versions.usage_context())
    parser = make_arg_parser(FlexibleArgumentParser())
    given = parser.parse_args([*arguments, "--model", path, "--data-parallel-size", str(ranks)])
    from inspect import signature

    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    context = signature(build_async_engine_client).parameters["usage_context"].default
    theirs = arg_utils.AsyncEngineArgs.from_cli_args(given).create_engine_config(context)
    return flat(ours, "", {}), flat(theirs, "", {})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("users", [False, True], ids=["defaults", "users"])
@pytest.mark.parametrize("device", [*DEVICES, "CPU"])
def test_every_field_is_that_of_vllm_serve(
    device: str, users: bool, parallel: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "CPU":
        real = arg_utils.EngineArgs.get_batch_defaults.__func__
        gib, name, step, seqs = DEVICES[device]

        def made_up(cls: Any, world_size: int) -> Any:
            with monkeypatch.context() as only:
                only.setattr(arg_utils, "current_platform", Device(gib, name))
                return real(cls, world_size)

        monkeypatch.setattr(arg_utils.EngineArgs, "get_batch_defaults", classmethod(made_up))
    named = OURS | (USERS if users else {})
    ours, theirs = said_by([f"--{key}={value}" for key, value in named.items()], parallel, ranks)
    assert len(ours) > 200
    differ = {path: (ours.get(path), theirs.get(path)) for path in ours.keys() | theirs.keys()
              if ours.get(path) != theirs.get(path) and not any(each in path for each in CHOSEN)}  # fmt: skip
    assert not differ
    found = tuple(ours[f".scheduler_config.{name}"] for name in ("max_num_batched_tokens", "max_num_seqs"))
    if users:
        assert found == (3000, 77)
    elif device != "CPU":
        assert found == (step, seqs)
