"""The functions of SGLang that are hooked or called, and the check that they are as expected. Pure, except for reading
SGLang's sources.

Nothing is hooked unless every line of these tables fits; otherwise SGLang has changed, and its own way is safer.
Sources are parsed, not imported, because the plugin is loaded before most of SGLang.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

TESTED = ("0.5.23",)  # with real servers
Kind: TypeAlias = Literal["before", "after", "around"]


class Seam(NamedTuple):
    """A function `name` in `module` (below `sglang.srt`), with its parameters as written there. `does` is the method of
    our hook, in one of the three sides of `hooking`."""

    module: str
    name: str
    parameters: str
    kind: Kind | None = None  # the kind of hook; None: we call the function
    does: str = ""

    @property
    def target(self) -> str:
        """The function's full name, for SGLang's registry of hooks."""
        return f"sglang.srt.{self.module}.{self.name}"


class Record(NamedTuple):
    """A class of SGLang, with the fields and attributes that we read."""

    module: str
    name: str
    fields: tuple[str, ...]


_CONN, _DECODE = "disaggregation.common.conn", "disaggregation.decode"
_SCHEDULER, _DPC = "managers.scheduler", "managers.data_parallel_controller"

HOOKS = (
    Seam("managers.disagg_service", "start_disagg_service", "", "around", "start_broker"),
    Seam(_CONN, "CommonKVSender._register_prefill_dp_rank", "self", "around", "register_room"),
    Seam(_CONN, "CommonKVSender.clear", "self", "after", "drop_room"),
    Seam(_CONN, "CommonKVReceiver.query_prefill_dp_ranks", "bootstrap_addr, bootstrap_rooms", "around", "find_rooms"),
    Seam(_DECODE, "DecodePreallocQueue.prefetch_prefill_dp_rank_queries", "self", "around", "prefetch_rooms"),
    Seam(_DECODE, "DecodePreallocQueue._resolve_pending_reqs", "self", "around", "resolve_pending"),
    Seam(_SCHEDULER, "Scheduler.handle_generate_request", "self, recv_req, *, mm_input_error", "before", "count"),
    Seam(_SCHEDULER, "Scheduler.handle_embedding_request", "self, recv_req, *, mm_input_error", "before", "count"),
    Seam(_SCHEDULER, "Scheduler.publish_load_snapshot", "self, force", "after", "report"),
    Seam(
        _DPC, "DataParallelController.__init__",
        "self, server_args, port_args, run_scheduler_process_func, prelaunched_schedulers", "around", "make_controller",
    ),
    Seam(_DPC, "DataParallelController.event_loop", "self", "around", "event_loop"),
)  # fmt: skip

CALLS = (
    Seam("plugins.hook_registry", "HookRegistry.register", "cls, target, hook, hook_type, *, source"),
    Seam("arg_groups.resolution_hooks", "register_resolution_hook", "name"),
    Seam("arg_groups.overrides", "declare_resolution", "server_args, source, **fields"),
    Seam("arg_groups.model_override_base", "resolving_view", "server_args"),
    Seam("arg_groups.serving_hook", "handle_load_balance_method", "server_args"),
    Seam("managers.io_struct", "sock_send", "socket, obj, flags"),
    Seam("managers.io_struct", "sock_recv", "socket, flags"),
    Seam("managers.utils", "is_health_check_generate_req", "recv_req"),
    Seam(_DPC, "DataParallelController.maybe_external_dp_rank_routing", "self, req"),
    Seam(_CONN, "CommonKVManager.record_failure", "self, bootstrap_room, failure_reason"),
    Seam(_CONN, "CommonKVManager.update_status", "self, bootstrap_room, status"),
    Seam(_CONN, "CommonKVReceiver.abort", "self"),
    Seam("runtime_context", "get_device", ""),
    Seam("runtime_context", "get_parallel", ""),
    Seam("runtime_context", "get_disagg", ""),
    Seam("runtime_context", "get_serving", ""),
)

RECORDS = (
    Record("managers.io_struct", "BaseReq", ("rid",)),
    Record("managers.io_struct", "TokenizedGenerateReqInput", ("input_ids", "bootstrap_room", "routed_dp_rank")),
    Record("managers.io_struct", "TokenizedEmbeddingReqInput", ("input_ids", "routed_dp_rank")),
    Record(
        "managers.load_snapshot", "LoadSnapshot",
        ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens",
         "max_total_num_tokens", "max_running_requests", "total_prefill_uncached_tokens", "total_prefill_busy_us"),
    ),
    Record("disaggregation.base.conn", "KVPoll", ("Failed", "Success")),
    Record("disaggregation.decode", "DecodeRequest", ("req", "kv_receiver")),
    Record("disaggregation.decode", "DecodePreallocQueue", ("queue", "pending_reqs", "transfer_queue", "kv_manager")),
    Record(
        _CONN, "CommonKVManager", ("request_status", "attn_tp_rank", "attn_cp_rank", "pp_rank", "dist_init_addr"),
    ),
    Record(_CONN, "CommonKVSender", ("kv_mgr", "bootstrap_room", "bootstrap_server_url", "conclude_state")),
    Record(_CONN, "CommonKVReceiver", ("bootstrap_addr", "bootstrap_room", "prefill_dp_rank", "conclude_state")),
    Record(
        _DPC, "DataParallelController",
        ("workers", "status", "_active_workers", "max_dp_size", "launch_dp_size", "dispatching", "soft_watchdog",
         "recv_from_tokenizer", "refresh_load_budget_on_dispatch", "_request_dispatcher"),
    ),
    Record("arg_groups.fields.memory", "Memory", ("disable_radix_cache",)),
    Record("disaggregation.kv_events", "KVEventsConfig", ("publisher", "endpoint", "replay_endpoint", "format")),
)  # fmt: skip


def mismatches(root: Path) -> Iterator[str]:
    """Yield a line for each difference between the sources at `root` (the folder `sglang/srt`) and the tables; none:
    SGLang is as expected."""
    for seam in (*HOOKS, *CALLS):
        found = parameters_of(_defined(root, seam.module, seam.name))
        if found is None:
            yield f"{seam.target} is not there"
        elif found != seam.parameters:
            yield f"{seam.target} takes ({found}), not ({seam.parameters})"
    for record in RECORDS:
        node = _defined(root, record.module, record.name)
        missing = sorted(set(record.fields) - (attributes(node) if isinstance(node, ast.ClassDef) else set()))
        if missing:
            yield f"sglang.srt.{record.module}.{record.name} has no {', '.join(missing)}"


def parameters_of(node: ast.AST | None) -> str | None:
    """Return the names of a function's parameters as one text, with `*` and `**`; None if `node` is not a function."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if given.vararg is not None:
        names.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        names.append("*")
    names += [argument.arg for argument in given.kwonlyargs]
    if given.kwarg is not None:
        names.append(f"**{given.kwarg.arg}")
    return ", ".join(names)


def _defined(root: Path, module: str, name: str) -> ast.AST | None:
    """Return the class or function `name` at the top of a module, or `Class.method` in it."""
    tree = _parse(root.joinpath(*module.split(".")).with_suffix(".py"))
    for part in name.split("."):
        body = getattr(tree, "body", [])
        tree = next((node for node in body if getattr(node, "name", None) == part), None)
    return tree


@cache
def _parse(path: Path) -> ast.AST | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that a class declares, or that any code in it sets on an object."""
    found: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.Assign):
            found |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.attr)
    return found
