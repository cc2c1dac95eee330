"""What a test types in a shell starts as a fork (`warm_starts`), as what it starts itself does.

`folder` comes first on the shell's PATH. There `pdbus` and `python` are a program of a few lines that hands what it was
given (words, folder, environment, streams) to the test, which starts the very command and says how it ended. Until then
the program stands for it: signals go on to it, and it dies with the program.
"""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

SOCKET = "asked"
REQUEST_BYTES = 1 << 18
STANDS_FOR = f'''#!{sys.executable} -IS
import _signal, _socket, os, sys  # in place of signal and socket, whose imports would take as long as all else
asked = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
asked.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "{SOCKET}"))
said = repr((os.path.basename(__file__), sys.argv[1:], os.getcwd(), dict(os.environ))).encode()
streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in range(3))
asked.sendmsg([said], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
    number = getattr(_signal, name)
    if _signal.getsignal(number) != _signal.SIG_IGN:
        _signal.signal(number, lambda number, _: asked.send(bytes([number])))
code = int(asked.recv(64) or 127)
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
'''


class Typed:
    """`close` ends what still runs."""

    def __init__(self) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="pd")
        self.folder = Path(self._kept.name)
        for name in ("pdbus", "python"):
            (self.folder / name).write_text(STANDS_FOR, encoding="utf-8")
            (self.folder / name).chmod(0o755)
        self._listens = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listens.bind(str(self.folder / SOCKET))
        self._listens.listen(64)
        self._lock = threading.Lock()
        self._asking: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listens.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        with self._lock:
            for each in self._asking:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listens.close()
        self._kept.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                asked, _ = self._listens.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=[asked])
            with self._lock:
                self._asking.add(asked)
            self._threads.append(thread)
            thread.start()

    def _serve(self, asked: socket.socket) -> None:
        """One command, from its start to its end."""
        with asked:
            said, streams, _, _ = socket.recv_fds(asked, REQUEST_BYTES, 3)
            if said:
                name, words, folder, environ = ast.literal_eval(said.decode())
                program = [str(Path(sys.executable).parent / name)] if name != "python" else []
                process = subprocess.Popen(
                    [sys.executable, *program, *words], stdin=streams[0], stdout=streams[1], stderr=streams[2],
                    cwd=folder, env=environ, start_new_session=True,
                )  # fmt: skip
                for stream in streams:
                    os.close(stream)
                ends = threading.Thread(target=self._say_the_end, args=[asked, process])
                ends.start()
                while number := self._signal(asked):
                    process.send_signal(number)
                process.kill()
                ends.join()
            with self._lock:
                self._asking.discard(asked)

    def _signal(self, asked: socket.socket) -> int:
        """The next one; 0 when nobody stands for the command any more."""
        try:
            return int.from_bytes(asked.recv(1), "big")
        except OSError:
            return 0

    def _say_the_end(self, asked: socket.socket, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with suppress(OSError):  # it was killed, or the test is over
            asked.send(str(code).encode())
