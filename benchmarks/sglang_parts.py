"""SGLang's own code in one process of the `sglang` benchmark, with our plugin or without it; no model runs.

What is replaced is what starts processes: the schedulers of the DP controller (it distributes requests over
data-parallel ranks) are sockets that lead to the benchmark.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.child import STDIN, Parent

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LOOP_S = 0.0005  # a decode scheduler's turn


class Hosted:
    """A prefill server of as many ranks as there are `endpoints`, in this process, which plays its rank 1. `method` is
    the plugin's; None: no plugin, and SGLang picks by `sglang_method`. With `split` false, the server decodes as
    well."""

    def __init__(
        self,
        folder: Path,
        endpoints: Sequence[str],
        bootstrap_port: int,
        method: str | None,
        *,
        sglang_method: str = "auto",
        page: int = 16,
        split: bool = True,
        **environ: str,
    ) -> None:
        sys.stdout = sys.stderr  # what SGLang prints is no answer of ours
        import sglang.srt.managers.data_parallel_controller as dpc  # and with it the rest of what is hooked
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, prepare_server_args

        from pdbus.sglang.hooking import hook

        self.address = f"127.0.0.1:{bootstrap_port}"
        self.environ = {**environ} | ({"PDBUS_SGLANG_METHOD": method} if method is not None else {})
        self.sides = hook(self.environ) if method is not None else None
        HookRegistry.apply_hooks()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self.args = prepare_server_args(
            ["--model-path", str(folder), "--device", "cpu", "--attention-backend", "torch_native", "--dp-size",
             str(len(endpoints)), "--skip-tokenizer-init", "--page-size", str(page),
             "--load-balance-method", sglang_method]
            + ["--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake",
               "--disaggregation-bootstrap-port", str(bootstrap_port)] * split
        )  # fmt: skip
        self.args.resolve_once()
        publish(self.args, role="test", ranks=SpawnRanks(world_rank=0, dp_rank=1, gpu_id=0))

        from sglang.srt.managers.disagg_service import start_disagg_service

        self.bootstrap_server = start_disagg_service()

        def launch(controller: Any, _args: Any, _ports: Any) -> None:
            import zmq

            for rank, endpoint in enumerate(endpoints):
                controller.workers[rank] = controller.context.socket(zmq.PUSH)
                controller.workers[rank].connect(endpoint)

        dpc.DataParallelController.launch_dp_schedulers = launch
        self.ports = PortArgs.init_new(self.args)
        self.controller = dpc.DataParallelController(self.args, self.ports, None)
        sys.stdout = sys.__stdout__

    def stop(self) -> None:
        """Stop the plugin's threads and brokers."""
        for side in self.sides or ():
            side.stop()


def generate(rid: str, ids: Sequence[int], room: int = 0, **also: Any) -> Any:
    """Return a request as SGLang's tokenizer process sends it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    return TokenizedGenerateReqInput(
        rid=rid, input_text="", input_ids=array("q", ids), input_embeds=None, mm_inputs=None, token_type_ids=None,
        sampling_params=SamplingParams(), return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False, bootstrap_host="127.0.0.1", bootstrap_room=room, **also,
    )  # fmt: skip


class Manager(SimpleNamespace):
    """Replaces a KV manager, which would register memory with Mooncake: its tables, and its methods for them."""

    def __init__(self) -> None:
        super().__init__(
            attn_tp_rank=0, attn_cp_rank=0, pp_rank=0, attn_dp_rank=0, dist_init_addr=None, request_status={},
            failure_records={}, failure_lock=threading.Lock(), deferred_bootstrap=None, is_dummy_cp_rank=False,
            sender_trace_module=None, _deferred_ack_targets={}, _deferred_ack_poisoned_rooms=set(),
            _staging_outstanding={}, req_to_decode_prefix_len={}, transfer_infos={}, _staging_ctx=None,
            defer_decode_allocation=False, addr_to_rooms_tracker={}, prefill_response_tracker={},
            _maybe_ack_drained_abort=lambda _room: None,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.disaggregation.common.conn import CommonKVManager

        if name in ("record_failure", "update_status", "check_status"):
            return getattr(CommonKVManager, name).__get__(self)
        raise AttributeError(name)


# --- what the benchmark starts ----------------------------------------------------------------------------------------


def rooms(folder: str, bootstrap_port: int, method: str | None, count: int) -> dict[str, list[float]]:
    """Register `count` rooms and return, for each, the microseconds of CommonKVSender's call on its thread
    (`registered`), and from its begin until a decode rank's query knows the room (`known`). `method` None: without the
    plugin."""
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender

    hosted = Hosted(
        Path(folder), ["inproc://0", "inproc://1"], bootstrap_port, method,
        sglang_method="auto" if method else "round_robin",
    )  # fmt: skip
    registered, known = [], []
    for room in range(count + 5):
        sender = object.__new__(CommonKVSender)
        sender.kv_mgr, sender.bootstrap_room, sender.bootstrap_server_url = Manager(), room, hosted.address
        CommonKVReceiver.query_prefill_dp_ranks(hosted.address, [room])  # as a rule decode asks first
        began = time.perf_counter()
        sender._register_prefill_dp_rank()
        registered.append((time.perf_counter() - began) * 1e6)
        while str(room) not in CommonKVReceiver.query_prefill_dp_ranks(hosted.address, [room]):
            time.sleep(LOOP_S)
        known.append((time.perf_counter() - began) * 1e6)
    hosted.stop()
    return {"registered": registered[5:], "known": known[5:]}  # the first ones open connections


def controller(
    parent: Parent,
    folder: str,
    endpoints: list[str],
    bootstrap_port: int,
    method: str | None,
    sglang_method: str,
    lengths: list[int],
    dispatches: int,
) -> None:
    """Run a DP controller until the parent has gone: first time `dispatches` of its choices and sends, then run its
    real loop. It sends the parent one JSON line: these times in µs of CPU, where it takes requests, and encoded
    requests with random prompts of these `lengths`. `method` None: without the plugin."""
    hosted = Hosted(Path(folder), endpoints, bootstrap_port, method, sglang_method=sglang_method)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in lengths]
    took = []
    for number in range(dispatches):
        request = generate(f"warm-{number}", prompts[number % len(prompts)], number)
        began = time.thread_time()
        hosted.controller._request_dispatcher(request)
        took.append((time.thread_time() - began) * 1e6)
    requests = [generate(f"{number}", ids, number) for number, ids in enumerate(prompts)]
    taken = [base64.b64encode(each).decode() for each in encoded(requests)]
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    parent.ready()
    where = {"tokenizer": hosted.ports.scheduler_input_ipc_name, "server": hosted.ports.instance_id}
    nonce = int(hosted.environ.get("PDBUS_SGLANG_DRAWN", "0"))
    parent.send(where | {"nonce": nonce, "requests": taken, "dispatch_us": took})
    hosted.controller.event_loop()


class StubRank(threading.Thread):
    """A prefill scheduler, on a thread, whose steps only take time. It repeats: take in what has come, compute whole
    prompts up to a budget of tokens in order, at `tokens_s` a second, report by `publish(taken, queue)`. `ended` gets
    the end of each request's step, in monotonic seconds; `listens` is set once it takes requests."""

    def __init__(self, endpoint: str, tokens_s: float, budget: int, publish: Any, ended: dict[str, float]) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._tokens_s = tokens_s
        self._budget = budget
        self._publish = publish
        self._ended = ended
        self.listens = threading.Event()

    def run(self) -> None:
        """The thread's loop; `start` runs it. It never ends."""
        import zmq
        from sglang.srt.managers.io_struct import sock_recv

        queue: list[Any] = []
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.bind(self._endpoint)
            self.listens.set()
            while True:
                if not queue:
                    socket.poll()
                taken = []
                while socket.poll(0):
                    taken.append(sock_recv(socket))
                queue += taken
                step: list[Any] = []
                tokens = 0
                while queue and (not step or tokens + len(queue[0].input_ids) <= self._budget):
                    step.append(queue.pop(0))
                    tokens += len(step[-1].input_ids)
                time.sleep(tokens / self._tokens_s)
                now = time.monotonic()
                self._ended.update((request.rid, now) for request in step)
                self._publish(taken, queue)


def ranks(
    parent: Parent, endpoints: list[str], server: str, bus: str, nonce: int, tokens_s: float, budget: int
) -> None:
    """Run stub schedulers at `endpoints`, which report their loads by SGLang's shared memory, and on `bus` if it is not
    empty. Each command is answered with the ends of all steps so far, by rid."""
    from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotWriter, shm_path_for

    from bus import Publisher
    from pdbus.sglang.rank import Rank, charge_of

    ended: dict[str, float] = {}

    def publisher(dp_rank: int) -> Any:
        writer = ShmLoadSnapshotWriter(shm_path_for(server), len(endpoints), dp_rank)
        on_bus = None
        if bus:
            instance = f"sglang-{nonce:016x}"
            started = Publisher(
                bus, instance=instance, dp_rank=dp_rank, dp_size=len(endpoints), role="prefill", epoch=nonce
            )  # fmt: skip
            on_bus = Rank(started.start(), nonce)
            started.wait_ready(30)

        def publish(taken: list[Any], queue: list[Any]) -> None:
            waiting = sum(len(request.input_ids) for request in queue)
            snapshot = LoadSnapshot(
                timestamp=time.time(), dp_rank=dp_rank, num_waiting_reqs=len(queue), num_total_tokens=waiting
            )
            writer.write(snapshot)
            if on_bus is not None:
                for request in taken:
                    on_bus.ingested(charge_of(request))
                on_bus.report(snapshot)

        return publish

    stubs = [StubRank(each, tokens_s, budget, publisher(rank), ended) for rank, each in enumerate(endpoints)]
    for stub in stubs:
        stub.start()
        stub.listens.wait()
    parent.serve(lambda: dict(ended))


def encoded(requests: Sequence[Any]) -> Iterator[bytes]:
    """Yield the bytes of each request as SGLang sends it, in whatever encoding it has chosen."""
    import zmq
    from sglang.srt.managers.io_struct import sock_send

    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://encoded")
        push.connect("inproc://encoded")
        for request in requests:
            request.wrap_pickle_fields()
            sock_send(push, request)
            yield pull.recv()


def _leave_with_parent() -> None:
    """SGLang's loop never ends."""
    while os.read(STDIN, 1 << 16):
        pass
    sys.stdout.flush()
    os._exit(0)
