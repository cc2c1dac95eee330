"""The units of examples/systemd: understood by systemd where there is one, and their command lines serve."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_page import blocks, run
from edge_process import wait
from part_process import WAIT_S, PartProcess

from bus.runtime.cli import EXIT_CONFIG, EXIT_REPLACED
from nodes.config import NodeConfig
from nodes.link.host import STREAM_GRACE_S
from nodes.own.engines.sim import sim_generate
from pdbus.client import Client

HERE = Path(__file__).parents[2] / "examples" / "systemd"
UNITS = ("pdbus-broker", "pdbus-controller@0", "pdbus-prefill@0", "pdbus-decode@0", "pdbus-edge@edge")
MORE = ("pdbus-controller@1", "pdbus-prefill2@0")
ANALYZE = shutil.which("systemd-analyze")
EXPOSURE_MAX = 2.0  # of 10, by systemd-analyze security


class Machine:
    """Where systemd's paths and our addresses lie in a test."""

    def __init__(self, place: Path) -> None:
        self.place = place
        random_bytes = random.SystemRandom()
        self.host = f"127.{random_bytes.randrange(1, 255)}.{random_bytes.randrange(1, 255)}.1"
        self._paths = {
            "/etc/pdbus": f"{place}/etc",
            "/opt/pdbus/bin": str(Path(sys.executable).parent),
            "%t": f"{place}/run",
            "%C": f"{place}/cache",
        }
        self._units = place / "units"

    def set_up(self) -> None:
        """What the page says, but for what asks the running systemd; its addresses become this machine's."""
        (self.place / "examples").symlink_to(HERE.parent)
        self._units.mkdir()
        (keys,) = blocks("Keys")
        first, more = blocks("systemd")
        for line in (*keys, *first, *more):
            if not line.startswith("systemctl"):
                line = line.replace("/etc/systemd/system/", f"{self._units}/")
                run(line.replace("/etc/pdbus", f"{self.place}/etc"), self.place)
        assert first[-1] == f"systemctl enable --now {' '.join(UNITS)}"
        assert more[-1] == f"systemctl enable --now {' '.join(MORE)}"
        both = f'[node]\ncontroller = ["{self.controller(0)}", "{self.controller(1)}"]'
        for said in (self.place / "etc").glob("*.*"):
            text = re.sub(r"10\.0\.0\.[12]|0\.0\.0\.0", self.host, said.read_text(encoding="utf-8"))
            said.write_text(text.replace("[node]", both), encoding="utf-8")

    def controller(self, number: int) -> str:
        return f"tcp://{self.host}:{5560 + 10 * number}#controller-{number}"

    def unit(self, name: str) -> dict[str, list[str]]:
        """Its settings and those of the common drop-in, after which they are read."""
        stem, at, index = name.partition("@")
        merged: dict[str, list[str]] = defaultdict(list)
        for path in (self._units / f"{stem}{at}.service", self._units / "pdbus-.service.d" / "common.conf"):
            for line in path.read_text(encoding="utf-8").splitlines():
                key, is_set, value = line.partition("=")
                if is_set and not line.startswith("#"):
                    named = {"%d": f"{self.place}/credentials/{name}", "%N": name, "%i": index}
                    for written, meant in (self._paths | named | {"%j": stem.rpartition("-")[2]}).items():
                        value = value.replace(written, meant)
                    merged[key].append(value)
        return merged

    def start(self, name: str) -> PartProcess:
        """What is to be done before it, then its command."""
        unit = self.unit(name)
        env = dict(each.split("=", 1) for line in unit["Environment"] for each in line.split())
        for file in unit["EnvironmentFile"]:
            if (path := Path(file.removeprefix("-"))).exists():
                env |= dict(line.split("=", 1) for line in path.read_text(encoding="utf-8").splitlines())
        (self.place / "run" / name).mkdir(mode=0o700, parents=True)
        (credential,) = unit["LoadCredential"]
        (self.place / "credentials" / name).mkdir(parents=True)
        shutil.copy(credential.partition(":")[2], self.place / "credentials" / name / "secret")
        for line in unit["ExecStartPre"]:
            subprocess.run(shlex.split(line), check=True, env=os.environ | env)
        (line,) = unit["ExecStart"]
        more = ("--engine", "sim", "--model", "sim") if "nodes." in line else ()
        return PartProcess([*shlex.split(line), *more], self.place / f"{name}.log", env)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One for all tests: none changes what the page's lines have made."""
    with tempfile.TemporaryDirectory(prefix="pd") as place:
        machine = Machine(Path(place))
        machine.set_up()
        yield machine


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze (Debian package systemd)")
def test_systemd_understands_them_and_calls_them_safe(machine: Machine, tmp_path: Path) -> None:
    units = shutil.copytree(machine.place / "units", tmp_path / "units")
    for path in units.glob("*.service"):
        path.write_text(path.read_text().replace("/opt/pdbus/bin", str(Path(sys.executable).parent)))
    env = os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:"}
    for name in (*UNITS, *MORE):
        for check in (["verify", "--man=no"], ["security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}"]):
            done = subprocess.run(
                [str(ANALYZE), *check, f"{name}.service"], capture_output=True, text=True, env=env, timeout=WAIT_S
            )
            assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
            assert check[0] == "security" or not done.stderr, done.stderr


def test_what_is_not_started_again_is_what_the_exit_codes_say(machine: Machine) -> None:
    for name in (*UNITS, *MORE):
        unit = machine.unit(name)
        assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
        assert unit["Restart"] == ["on-failure"]
        assert unit["RestartPreventExitStatus"] == [f"{EXIT_CONFIG} {EXIT_REPLACED}"]
        assert int(unit["TimeoutStopSec"][0]) > NodeConfig.drain_s + STREAM_GRACE_S
        assert unit["KillMode"] == ["mixed"]


def test_nodes_alone_may_pin_memory_for_rdma(machine: Machine) -> None:
    for name in (*UNITS, *MORE):
        assert machine.unit(name)["LimitMEMLOCK"] == (["infinity"] if re.search("prefill|decode", name) else []), name


def test_their_command_lines_serve_with_keys_and_leave_with_0(machine: Machine) -> None:
    running: list[PartProcess] = []
    try:
        for name in (*UNITS, *MORE):
            running.append(machine.start(name))
        for process in running:
            process.until_ready()
        for number in range(2):
            with Client(machine.controller(number), keys=str(machine.place / "etc" / "keys")) as client:  # the operator
                assert client.generate_tokens([5, 6, 7], max_tokens=4).tokens() == sim_generate([5, 6, 7], 4)
                assert {rank.instance for rank in client.status().ranks} == {"prefill", "prefill2", "decode"}
        wait(lambda: ready(f"http://{machine.host}:8000/ready"))
        for process in reversed(running):
            process.stop()
    finally:
        for process in running:
            process.close()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
