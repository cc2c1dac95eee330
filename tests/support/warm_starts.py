"""Processes that tests start, as forks of one that has imported what they import: most of a start's time goes there.

While `Starts.on`, `subprocess.Popen` asks a server, a process with one thread and no ZeroMQ context, for each command
`python [-P] -m MODULE ...` or `python [-P] SCRIPT ...`. The server forks with CLONE_PARENT: the new process is a child
of its caller as any other, with the pid, exit code, signals, streams, environment, folder, limits and process group
that it would have. A command starts cold where a fork cannot be what it asks for (other flags, another PYTHONPATH).
Forks share the seed of their strings' hashes, and what /proc says of their command line and first environment: a test
that is about these, or about the start itself, is marked `cold`.

Programs that start others get a server of their own, forked before they run. What only some commands import (`WANTED`:
torch, matplotlib) is imported by a second server, a fork of the first: with that in it each fork would cost three times
as much. A server ends with its caller, when the other end of its socket is closed.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import json
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED = (
    "bus.__main__", "controller.__main__", "nodes.main", "nodes.own.kinds", "nodes.own.engines.numpy_llama",
    "pdbus.cli", "pdbus.edge.server", "pdbus.top.screen", "soak.run", "numpy", "rich.live", "rich.status", "rich.table",
    "rich._emoji_codes", "click._textwrap", "encodings.idna",
    *(
        f"pdbus.commands.{name}"
        for name in ("up", "serve", "generate", "status", "top", "trace", "replay", "plan", "calibrate", "keys", "demo")
    ),
)  # fmt: skip
NOT_KEPT = ("bus.__main__", "controller.__main__")  # they are to run as `__main__`
OURS = ("bus", "controller", "nodes", "pdbus", "benchmarks", "simulation", "soak", "pytest")
ROOT = Path(__file__).resolve().parents[2]
BESIDE = {
    str(folder) for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "support", ROOT / "examples")
}  # on PYTHONPATH they hide nothing that is imported
PLOTS = ("matplotlib.pyplot", "matplotlib.backends.backend_agg")
WANTED = {  # imported for commands with one of these words, or variables
    "benchmarks": (*PLOTS, "benchmarks.__main__", "benchmarks.parts", "requests", "aiohttp"),
    str(ROOT / "benchmarks" / "child.py"): tuple(
        f"benchmarks.{name}" for name in ("busy", "peers_parts", "edge_parts", "client", "node")
    ),
    "--out": PLOTS,
    "pytest": ("pytest",),
    "simulation.run": (
        "simulation.cached", "simulation.crowded", "simulation.pairs", "simulation.small", "simulation.story",
        "simulation.tight", "simulation.transitions", "simulation.tries", "simulation.world", "multiprocessing.pool",
    ),
    "torch": ("torch", "nodes.own.engines.torch_engine"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace.sampling",
    ),
}  # fmt: skip
STARTERS = ("up", "demo", "soak", "benchmarks", "replay", "plan", "calibrate", "pytest")  # that start processes
# Variables that an interpreter or a library reads once begin so. Others of OpenTelemetry are read as it is used.
AT_START = (
    "PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OPENBLAS_", "OMP_", "MKL_", "TZ", "MPL", "OTEL_PYTHON_",
    "OTEL_PROPAGATORS", "OTEL_SPAN_", "OTEL_ATTRIBUTE_", "OTEL_EVENT_", "OTEL_LINK_",
)  # fmt: skip
SEED = "PYTHONHASHSEED"  # commands with another one than ours have a server that started with it
LIMITS = sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
PYTHONS = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN, signal.SIGINT: signal.default_int_handler}
RESTORED = {signal.SIGPIPE, signal.SIGXFSZ}  # by Popen, if the caller ignores them
CLONE_PARENT, PR_GET_TID_ADDRESS = 0x8000, 40
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine) if sys.platform == "linux" else None
LATE_S = 200.0  # after which a server that is not ready says where it stands
WAIT_S = 240.0  # a server that is late is still sooner than a start without it
NAME = "warm_starts"  # of servers, in /proc
MESSAGE_BYTES = 1 << 18

Request = dict[str, Any]


class Starts:
    """The starts of this process."""

    def __init__(self, asked: socket.socket | None = None) -> None:
        """`asked`: the other end of the server's socket; without, a server starts at the first start."""
        self.on = False
        self._asked = {"": asked} if asked is not None else {}  # by the seed of hashes; empty: ours
        self._others: dict[tuple[str, str], socket.socket] = {}  # of servers with more imported, by seed and what
        self._lock = threading.Lock()
        self._cold: Any = None

    def install(self) -> None:
        """In `subprocess`, for as long as the process lives; again in a fork, whose environment may be another."""
        self._found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self._read_at_start = read_at_start(os.environ)
        if self._cold is not None:
            return
        self._cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        starts = self

        def execute(popen: Any, *given: Any) -> None:
            if not (starts.on and starts._warm(popen, *given)):
                starts._cold(popen, *given)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Until the server, if it is new, has imported all. On a busy machine with nothing compiled it takes a minute,
        in which no command's own limit is to run."""
        with self._lock:
            if SYS_CLONE is not None and "" not in self._asked:
                self._asked[""] = self.launch()
                answer(self._asked[""], {}, [])

    def close(self) -> None:
        """Its commands start cold from now on, and its server ends."""
        self.on = False
        for asked in (*self._asked.values(), *self._others.values()):
            asked.close()

    def _warm(
        self, popen: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
        env: Any, startupinfo: Any, creationflags: Any, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: bool,
        gid: Any, gids: Any, uid: Any, umask: int, start_new_session: bool, process_group: int,
    ) -> bool:  # fmt: skip
        """`Popen._execute_child` of a command that can start warm; whether it can."""
        if SYS_CLONE is None or executable or preexec_fn or pass_fds or shell or not close_fds or not restore_signals:
            return False
        if (gid, gids, uid, umask) != (None, None, None, -1) or not (program := self.program(args)):
            return False
        environ = {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()} if env is not None else own_environment()
        folder = os.path.abspath(os.fsdecode(cwd or os.curdir))
        found = environ.get("PYTHONPATH", "").split(os.pathsep)
        if not BESIDE.issuperset(found) and found != self._found:
            return False
        seed = environ.get(SEED, "") if environ.get(SEED) != self._read_at_start.get(SEED) else ""
        own = self._read_at_start | ({SEED: seed} if seed else {})
        if read_at_start(environ) != own or not os.access(folder, os.X_OK):
            return False
        request = program | {
            "environ": environ,
            "found": [] if found == self._found else found,
            "folder": folder,
            "session": bool(start_new_session),
            "group": process_group if process_group != -1 else os.getpgrp(),
            "ignored": [n for n in SIGNALS if n not in RESTORED and signal.getsignal(n) is signal.SIG_IGN],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "limits": [resource.getrlimit(limit) for limit in LIMITS],
            "cores": list(os.sched_getaffinity(0)),
        }
        streams = (p2cread, c2pwrite, errwrite)
        more = sorted({name for word in WANTED.keys() & {*request["line"], *environ} for name in WANTED[word]})
        pid = self._ask(request, [i if fd == -1 else fd for i, fd in enumerate(streams)], more, seed)
        if not pid:
            return False
        popen.pid, popen._child_created = pid, True
        popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return True

    def program(self, args: Any) -> Request | None:
        """What a command runs, if it can start warm."""
        return program_of(args)

    def launch(self, seed: str = "") -> socket.socket:
        """Start the server, with this seed of hashes (empty: ours); the socket to ask it by."""
        return launch(["-P", os.path.abspath(__file__)], WAIT_S, **({SEED: seed} if seed else {}))

    def _ask(self, request: Request, streams: Sequence[int], more: Sequence[str], seed: str = "") -> int:
        """The new child's pid; 0 where it must start cold. `more`: modules that its server imports besides."""
        with self._lock:
            if seed not in self._asked:
                self._asked[seed] = self.launch(seed)
            asked, name = self._asked[seed], (seed, " ".join(more))
            if more and name not in self._others:
                ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.settimeout(WAIT_S)
                with its:
                    if not answer(asked, {"import": more}, [its.fileno()]):
                        ours.close()
                        return 0
                self._others[name] = ours
            return answer(self._others.get(name, asked), request, streams)


STARTS = Starts()  # of a process that runs tests


def program_of(args: Any) -> Request | None:
    """What a command of a test runs, if it can start warm."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return None
    words = [os.fsdecode(word) for word in args]
    safe = words[1:2] == ["-P"]
    kind, *rest = words[1 + safe :] or [""]
    if words[0] != sys.executable:
        return None
    if (
        kind == "-m"
        and rest
        and (rest[0].partition(".")[0] in OURS or any(os.path.exists(f"{folder}/{rest[0]}.py") for folder in BESIDE))
    ):
        return {"line": words, "safe": safe, "module": rest[0], "argv": rest}
    return {"line": words, "safe": safe, "module": "", "argv": [kind, *rest]} if os.path.isfile(kind) else None


def own_environment() -> dict[str, str]:
    """Of the process: a C library (readline) may have set what `os.environ` lacks."""
    words: dict[str, str] = {}
    for line in ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"):
        if line is None:
            break
        name, _, value = os.fsdecode(line).partition("=")
        words[name] = value
    return words


def read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """By the interpreter or a library."""
    return {
        name: environ[name] for name in environ if name.startswith(AT_START) and environ[name] and name != "PYTHONPATH"
    }


def answer(asked: socket.socket, request: Request, streams: Sequence[int]) -> int:
    """Ask a server to start something; return its pid, 0 if nothing was started."""
    try:
        socket.send_fds(asked, [json.dumps(request).encode()], streams)
    except OSError:  # the request is too long, or no server is there
        return 0
    try:
        return int(asked.recv(64) or 0)
    except (OSError, ValueError):  # the server was killed, or is late: nothing is to start twice
        asked.close()
        return 0


def launch(words: Sequence[str], wait_s: float, **environ: str) -> socket.socket:
    """Start a server for this process, Python with these words and variables; the socket to ask it by."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(wait_s)
    with its:
        os.posix_spawn(
            sys.executable, [sys.executable, *words],
            os.environ | {"OPENBLAS_NUM_THREADS": "1"} | environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, its.fileno(), stream) for stream in range(2)],
        )  # fmt: skip
    return ours


# --- the server ---------------------------------------------------------------------------------------------------


def main(prepare: Callable[[], list[random.Random]]) -> None:
    """Serve the caller, whose socket stdin and stdout are: buffers of a stream that can seek are others. `prepare`
    imports what the forks have, and says what draws anew in each."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # what our caller has from its own, say
    asked = socket.socket(fileno=os.dup(0))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes before a child has its handlers waits for them
    discard(0, 1)
    with open(os.dup(2), "w") as told:  # the caller stops waiting soon after that, and does not know why
        faulthandler.dump_traceback_later(LATE_S, file=told)
        drawn = prepare()
        faulthandler.cancel_dump_traceback_later()
    Path("/proc/self/comm").write_text(NAME)
    settle()
    discard(2)
    request = serve(asked)
    for rng in drawn:
        rng.seed()
    try:
        run(request)
        leave(0)
    except SystemExit as asked_to:
        leave(asked_to.code)
        raise


def settle() -> None:
    """Flush and collect, after imports, what each fork would flush and collect again."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each fork writes what was said there
    gc.collect()
    gc.freeze()  # a collection leaves shared pages alone


def discard(*streams: int) -> None:
    """What is said there; nobody is to wait for the ends of streams that a server has."""
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for stream in streams:
            os.dup2(nowhere.fileno(), stream)


def import_programs() -> list[random.Random]:
    """What the commands of tests need."""
    import_module("bus.runtime.logs")._structlog()  # it leaves out what others would bring along
    return import_all(IMPORTED)


def import_them(names: Sequence[str]) -> None:
    """What is not installed is found in the checkout, which no program has on its path for that."""
    mine, sys.path = sys.path, [*sys.path, str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
    for name in names:
        import_module(name)
    sys.path = mine


def import_all(names: Sequence[str]) -> list[random.Random]:
    """What there is to draw anew."""
    import_them(names)
    for name in [name for name in sys.modules if name in NOT_KEPT]:
        package, _, own = name.rpartition(".")
        del sys.modules[name]
        vars(sys.modules[package]).pop(own, None)
    return [each for each in gc.get_objects() if type(each) is random.Random]


def serve(asked: socket.socket) -> Request:
    """Fork for each request, until nobody can ask any more. Returns in the children alone."""
    while True:
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork"
        said, streams, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 3)
        if not said:
            os._exit(0)
        request = json.loads(said)
        if not request:  # our caller only wants to know that we are ready
            asked.send(b"0")
            continue
        if (pid := fork_sibling()) == 0:
            if "import" not in request:
                return become(request, streams, asked)
            asked.send(str(os.getpid()).encode())
            asked.close()
            asked = socket.socket(fileno=streams[0])
            import_them(request["import"])
            settle()
            continue
        for stream in streams:
            os.close(stream)
        if pid < 0:
            asked.send(b"0")


def fork_sibling() -> int:
    """As os.fork, but the child is one of our parent. -1 where that cannot be."""
    libc, api = ctypes.PyDLL(None), ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = libc.syscall(SYS_CLONE, ctypes.c_ulong(CLONE_PARENT | signal.SIGCHLD), 0, 0, 0, 0)
    if pid:
        api.PyOS_AfterFork_Parent()
        return int(pid)
    at = ctypes.c_void_p()
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(at)) == 0 and at.value:
        ctypes.c_int.from_address(at.value).value = os.getpid()  # libc's fork does so
    api.PyOS_AfterFork_Child()
    return 0


def become(request: Request, streams: Sequence[int], asked: socket.socket) -> Request:
    """Make the fork what a new process would be."""
    if request["session"]:
        os.setsid()
    if request["group"] != os.getpgrp() and not request["session"]:
        os.setpgid(0, request["group"])
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        if tuple(values) != resource.getrlimit(limit):
            resource.setrlimit(limit, values)
    Path("/proc/self/comm").write_text("python")
    starts = Starts()
    if set(STARTERS) & set(request["argv"][:2]):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            Path("/proc/self/comm").write_text(NAME)
            for each in (ours, asked):
                each.close()
            for stream in streams:
                os.close(stream)
            return serve(its)
        its.close()
        ours.settimeout(WAIT_S)
        starts = Starts(ours)
        starts.on = True
        starts.install()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    fresh = open(2, "w", -1, sys.stderr.encoding, sys.stderr.errors, closefd=False)  # noqa: SIM115
    fresh.reconfigure(line_buffering=sys.stderr.line_buffering, write_through=sys.stderr.write_through)
    sys.stderr = sys.__stderr__ = fresh
    os.environ.clear()
    os.environ.update(request["environ"])
    for name in SIGNALS:
        wanted = signal.SIG_IGN if name in request["ignored"] else PYTHONS.get(name, signal.SIG_DFL)
        if signal.getsignal(name) is not wanted:
            signal.signal(name, wanted)
    try:
        asked.send(str(os.getpid()).encode())
    except OSError:  # our caller has started another in our place
        os._exit(1)
    asked.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return request


def run(request: Request) -> None:
    """As `__main__`; what it raises is the interpreter's to handle."""
    sys.orig_argv, sys.argv = request["line"], request["argv"]
    sys.path[:0] = request["found"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if "code" in request:
        sys.path.insert(0, "")
        exec(request["code"], main.__dict__)  # noqa: S102
        return
    if request["module"]:
        if not request["safe"]:
            sys.path.insert(0, request["folder"])
        runpy._run_module_as_main(request["module"])  # type: ignore[attr-defined]
        return
    path = request["argv"][0]
    if not request["safe"]:
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)  # noqa: S102


def leave(code: object) -> None:
    """End as the interpreter does, but without taking down the modules that are shared, which copies them all. Returns
    where the interpreter has more to say."""
    if code is not None and not isinstance(code, int):
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main(import_programs)
