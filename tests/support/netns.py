"""Hosts on one machine: network namespaces, each with one link to a router that can lose, delay and limit packets.

`with Network() as net: host = net.host("broker", "10.0.0.1")`. Needs root, iproute2 and /dev/net/tun. The router is a
namespace too, and nothing is seen of any of this outside. A child process waits for the end of this one, however it
comes, and then kills what runs in the namespaces and removes them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "pdbus-"  # then the pid of whose namespace it is, and a name
GATEWAY = "10.0.0.254"
ROUTER = "net"
WAIT_S = 60.0  # for a command or an end, of a busy machine
CUT, DELAYED = 100, 200  # priorities of the router's rules
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def unable() -> str:
    """Why this machine cannot have such hosts; empty when it can. Found out by trying."""
    name = f"{PREFIX}{os.getpid()}-try"
    try:
        for words in (("netns", "add", name), ("-n", name, "link", "add", "name", "v", "type", "veth"),
                      ("-n", name, "rule", "add", "to", "10.0.0.1", "blackhole"),
                      ("-n", name, "tuntap", "add", "dev", "t", "mode", "tun")):  # fmt: skip
            run("ip", *words)
        run("tc", "-n", name, "qdisc", "add", "dev", "v", "root", *_tbf("1mbit"))
    except OSError as error:
        return f"no network namespaces here: {error}"
    finally:
        with suppress(OSError):
            run("ip", "netns", "del", name)
    return ""


def run(*words: str, said: str | None = None) -> str:
    """Its stdout. OSError when it fails."""
    done = subprocess.run(words, input=said, text=True, capture_output=True, timeout=WAIT_S)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def set_kernel(namespace: str, settings: dict[str, str]) -> None:
    """Of /proc/sys/net/ipv4."""
    lines = "\n".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items())
    run("ip", "netns", "exec", namespace, "sh", "-ec", lines)


class Host:
    """`namespace` is its name for `ip netns exec`."""

    def __init__(self, net: Network, name: str, address: str) -> None:
        self.name, self.address, self.namespace = name, address, f"{net.prefix}{name}"
        self._net = net

    def command(self, line: str) -> list[str]:
        """What runs this line of shell here."""
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", f"exec {line}"]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The sockets that this thread opens meanwhile are this host's; those of threads that it starts, for ever."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/run/netns/{self.namespace}") as theirs:
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())

    def connections(self, state: str = "established") -> list[tuple[str, str]]:
        """Its TCP connections in this state, by both ends."""
        rows = run(*self.command(f"ss -Htn state {state}")).splitlines()
        return [(row.split()[2], row.split()[3]) for row in rows]

    # --- faults -------------------------------------------------------------------------------------------------

    def link(self, state: str) -> None:
        """`ip link set eth0 down`, and `up` with the route that went with it."""
        lines = [f"link set dev eth0 {state}"] + [f"route add default via {GATEWAY} dev eth0 onlink"] * (state == "up")
        run("ip", "-n", self.namespace, "-batch", "-", said="\n".join(lines))

    def vanish(self) -> None:
        """As if its power failed: nothing of it is heard any more, no FIN and no RST, and its processes are gone."""
        self._net.isolate(self, True)
        for pid in run("ip", "netns", "pids", self.namespace).split():
            os.kill(int(pid), signal.SIGKILL)

    def come_back(self, address: str = "") -> None:
        """Started anew, with another address if one is named. Its parts are not started."""
        self._net.isolate(self, False)
        if address:
            self._net.readdress(self, address)

    def limit(self, rate: str) -> None:
        """Each way at most this, as tc writes it (`20mbit`); empty: no limit."""
        for namespace, device in ((self.namespace, "eth0"), (self._net.namespace, self.name)):
            words = ("replace", "dev", device, "root", *_tbf(rate)) if rate else ("del", "dev", device, "root")
            run("tc", "-n", namespace, "qdisc", *words)


class Network:
    def __init__(self) -> None:
        _remove_orphans()
        self.prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}-"
        self.namespace = f"{self.prefix}{ROUTER}"
        self._keeper = subprocess.Popen([sys.executable, __file__, self.prefix], stdin=subprocess.PIPE, process_group=0)
        self._delays: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            run("ip", "netns", "add", self.namespace)
            set_kernel(self.namespace, {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """All processes in it are killed, and all of it is gone when this returns."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(WAIT_S)
        for delay in self._delays:
            delay.wait(WAIT_S)

    def host(self, name: str, address: str) -> Host:
        """A new one, up and connected. `name` is that of its link at the router, too: 15 letters at most."""
        host = Host(self, name, address)
        run("ip", "netns", "add", host.namespace)
        run("ip", "-n", self.namespace, "link", "add", "name", name, "type", "veth",
            "peer", "name", "eth0", "netns", host.namespace)  # fmt: skip
        self._router(
            f"address add {GATEWAY}/32 dev {name}", f"link set dev {name} up", f"route add {address} dev {name}"
        )
        lines = (f"address add {address}/32 dev eth0", "link set dev lo up")
        run("ip", "-n", host.namespace, "-batch", "-", said="\n".join(lines))
        set_kernel(host.namespace, {"tcp_congestion_control": "reno"})  # which every kernel lets a namespace have
        host.link("up")
        return host

    def readdress(self, host: Host, address: str) -> None:
        self._router(f"route del {host.address} dev {host.name}", f"route add {address} dev {host.name}")
        lines = (
            f"address add {address}/32 dev eth0",
            f"address del {host.address}/32 dev eth0",
        )  # routes go with the last
        run("ip", "-n", host.namespace, "-batch", "-", said="\n".join(lines))
        host.address = address

    # --- faults -------------------------------------------------------------------------------------------------

    @contextmanager
    def cut(self, *ways: tuple[Host, Host]) -> Iterator[None]:
        """While this lasts, what the first of each two hosts sends to the second is lost on the way."""
        rules = [f"from {source.address} to {target.address} priority {CUT} blackhole" for source, target in ways]
        self._router(*(f"rule add {rule}" for rule in rules))
        try:
            yield
        finally:
            self._router(*(f"rule del {rule}" for rule in rules))

    def isolate(self, host: Host, isolated: bool) -> None:
        """Lose what it sends and what is sent to it."""
        verb = "add" if isolated else "del"
        rules = (f"from {host.address} priority {CUT} blackhole", f"to {host.address} priority {CUT} blackhole")
        self._router(*(f"rule {verb} {rule}" for rule in rules))

    @contextmanager
    def delay(self, one_way_s: float, *ways: tuple[Host, Host]) -> Iterator[None]:
        """While this lasts, what the first of each two hosts sends to the second arrives so much later."""
        device = f"late{len(self._delays)}"
        self._router(f"tuntap add dev {device} mode tun", f"link set dev {device} up txqueuelen 10000")
        line = [sys.executable, str(Path(__file__).with_name("delay_line.py")), device, str(one_way_s)]
        delay = subprocess.Popen(["ip", "netns", "exec", self.namespace, *line], stdout=subprocess.PIPE)
        self._delays.append(delay)
        assert delay.stdout is not None
        assert delay.stdout.readline(), "the delay line did not start"
        delay.stdout.close()
        table = DELAYED + len(self._delays)
        rules = [
            f"from {source.address} to {target.address} iif {source.name} priority {DELAYED} table {table}"
            for source, target in ways
        ]
        self._router(f"route add default dev {device} table {table}", *(f"rule add {rule}" for rule in rules))
        try:
            yield
        finally:
            self._router(*(f"rule del {rule}" for rule in rules))
            delay.terminate()
            delay.wait(WAIT_S)
            self._router(f"link del dev {device}")

    def _router(self, *lines: str) -> None:
        run("ip", "-n", self.namespace, "-batch", "-", said="\n".join(lines))


def between(one: Host, other: Host) -> tuple[tuple[Host, Host], tuple[Host, Host]]:
    """Both ways."""
    return (one, other), (other, one)


def _tbf(rate: str) -> Sequence[str]:
    return ("tbf", "rate", rate, "burst", "32kb", "latency", "50ms")


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


# --- leaving nothing behind -----------------------------------------------------------------------------------------


def _remove_orphans() -> None:
    """What somebody left whose machine, or whose keeper, was killed too."""
    for name in _namespaces(PREFIX):
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            remove(f"{PREFIX}{pid}-")


def _namespaces(prefix: str) -> list[str]:
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line]
    return [name for name in names if name.startswith(prefix)]


def remove(prefix: str) -> None:
    """Kill what runs in the namespaces of this prefix, and remove them."""
    for name in _namespaces(prefix):
        with suppress(OSError):  # somebody else removes it
            while pids := run("ip", "netns", "pids", name).split():
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.01)  # for the killed to go
            run("ip", "netns", "del", name)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove(sys.argv[1])
