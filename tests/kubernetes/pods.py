"""The pods of rendered manifests as processes of this machine: a kubelet in small.

A pod has an address of its own on the loopback network, and a folder with what its volumes hold, laid out and with the
modes that a kubelet gives them. Names of the DNS, `0.0.0.0` and the paths of mounts are replaced by those in its
settings. Where the tests are root's, pods are not.
"""

from __future__ import annotations

import base64
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rendered import POD_INDEX, Object, Way, container, ports, settings, workloads

WAIT_S = 120.0  # of a busy machine; a wait that succeeds ends with its event
POLL_S = 0.05
ETC = "/etc/pdbus"


class Namespace:
    """What `kubectl apply` would leave: workloads, and the objects that hold settings and keys."""

    def __init__(self, overlay: str, keys: list[Object], place: Path) -> None:
        self.place = place
        self.workloads = workloads(overlay)
        self.pods: dict[str, Pod] = {}
        self._settings = settings(overlay)
        self._held = {(each["kind"], each["metadata"]["name"]): each for each in keys if each}
        self._net = f"127.{random.SystemRandom().randrange(1, 255)}.{random.SystemRandom().randrange(1, 255)}"
        self._used = 0
        self._names: dict[str, str] = {}
        for component, workload in self.workloads.items():
            for index in range(workload["spec"].get("replicas", 1)):
                name = f"pdbus-{component}-{index}"
                self._names[f"{name}.pdbus-{component}"] = self.new_address()
                self.pods[name] = Pod(self, component, index, self._names[f"{name}.pdbus-{component}"])
        self._names["pdbus-broker"] = self._names["pdbus-broker-0.pdbus-broker"]

    def __enter__(self) -> Namespace:
        try:
            for pod in self.pods.values():
                pod.start()
            for pod in self.pods.values():
                pod.until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.kill()

    def new_address(self) -> str:
        self._used += 1
        return f"{self._net}.{self._used}"

    def of(self, *components: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.component in components]

    def resolved(self, text: str, pod: Pod) -> str:
        """As the pod reads it: paths of its own, and an address where a name stands."""
        text = text.replace(ETC, str(pod.etc)).replace("0.0.0.0", pod.address)
        return re.sub(r"(?<=tcp://)pdbus-[a-z0-9.-]+(?=:)", lambda name: self._names[name[0]], text)

    def files(self, volume: Object, pod: Pod) -> tuple[dict[str, bytes], int]:
        """What a volume holds, and the mode of its files as a kubelet sets it for a pod with an `fsGroup`."""
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            if name.startswith("pdbus-settings-"):
                return {"pdbus.toml": self.resolved(self._settings, pod).encode()}, 0o644
            data = self._held["ConfigMap", name].get("data") or {}
            return {key: value.encode() for key, value in data.items()}, 0o644
        secret = volume["secret"]
        data = self._held["Secret", secret["secretName"]]["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}, secret["defaultMode"] | 0o040

    def connections(self) -> set[Way]:
        """Who is connected to whom now, by component and port."""
        at = {pod.address: pod.component for pod in self.pods.values()}
        listening = {(pod.address, port) for pod in self.pods.values() for port in pod.listening()}
        return {
            Way(pod.component, at[ip], port)
            for pod in self.pods.values()
            for ip, port in pod.connected()
            if (ip, port) in listening
        }


class Pod:
    def __init__(self, namespace: Namespace, component: str, index: int, address: str) -> None:
        self.component, self.index, self.address = component, index, address
        self.name = f"pdbus-{component}-{index}"
        self.etc = namespace.place / self.name
        self.process: subprocess.Popen[bytes] | None = None
        self._namespace = namespace
        self._workload = namespace.workloads[component]
        self._container = container(self._workload)

    # --- its life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        security = self._workload["spec"]["template"]["spec"]["securityContext"]
        self._mount(security["fsGroup"])
        python = Path(sys.executable).parent
        line = [*self._container["command"], *self._container.get("args", ())]
        line[0] = str(python / line[0])
        bare = {key: value for key, value in os.environ.items() if not key.startswith("PDBUS_")}
        env = bare | {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent", "PDBUS_DIR": "/nonexistent"} | self._env()
        if os.geteuid() == 0:  # it may read what lies in root's folders, as this Python may, and write nothing
            user = [f"--reuid={security['runAsUser']}", f"--regid={security['runAsGroup']}", "--clear-groups"]
            line = ["setpriv", *user, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", *line]
        with open(self.etc.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, env=env, cwd="/")

    def until_ready(self) -> None:
        """As a kubelet looks: first its start, then whether it is ready."""
        for probe in ("startupProbe", "readinessProbe"):
            until = time.monotonic() + WAIT_S
            while not self.probed(probe):
                assert self.process is not None
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < until, f"{self.name}: {probe} says {self.said(probe)}\n{self.log()}"
                time.sleep(POLL_S)

    def terminate(self) -> int:
        """preStop, then SIGTERM; its exit code, within its time."""
        assert self.process is not None
        hook = self._container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        time.sleep(hook["sleep"]["seconds"])  # that is what it is
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self._workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])

    def replace(self) -> None:
        """The next pod of this name, once this one has ended. A rank's has another address, which only it knows."""
        if self.component in ("prefill", "decode"):
            self.address = self._namespace.new_address()
        self.start()
        self.until_ready()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)

    # --- looking ------------------------------------------------------------------------------------------------

    def probed(self, probe: str) -> bool:
        return self.said(probe)[0] == 200

    def said(self, probe: str) -> tuple[int, str]:
        asked = self._container[probe]["httpGet"]
        port = ports(self._workload)[asked["port"]]
        try:
            with urllib.request.urlopen(f"http://{self.address}:{port}{asked['path']}", timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def listening(self) -> set[int]:
        """Ports of tcp; all at its own address."""
        ends = self._ends(psutil.CONN_LISTEN)
        assert {end.laddr.ip for end in ends} <= {self.address}
        return {end.laddr.port for end in ends}

    def connected(self) -> set[tuple[str, int]]:
        return {(end.raddr.ip, end.raddr.port) for end in self._ends(psutil.CONN_ESTABLISHED)}

    def log(self) -> str:
        return self.etc.with_suffix(".log").read_text(encoding="utf-8")[-4000:]

    def _ends(self, status: str) -> list[Any]:
        assert self.process is not None
        return [end for end in psutil.Process(self.process.pid).net_connections("tcp") if end.status == status]

    # --- what it is given ---------------------------------------------------------------------------------------

    def _env(self) -> dict[str, str]:
        fields = {POD_INDEX: str(self.index), "status.podIP": self.address}
        env: dict[str, str] = {}
        for each in self._container["env"]:
            said = fields[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
            said = re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], said)
            env[each["name"]] = self._namespace.resolved(said, self)
        return env

    def _mount(self, group: int) -> None:
        volumes = {each["name"]: each for each in self._workload["spec"]["template"]["spec"]["volumes"]}
        for mount in self._container["volumeMounts"]:
            if not mount["mountPath"].startswith(ETC):
                continue
            files, mode = self._namespace.files(volumes[mount["name"]], self)
            target = self.etc / Path(mount["mountPath"]).relative_to(ETC)
            for name, content in files.items():
                path = target if "subPath" in mount else target / "..data" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                if os.geteuid() == 0:
                    os.chown(path, 0, group)
                    path.chmod(mode)
                else:
                    path.chmod(mode & 0o700)  # then it is the pod's own
                if path != target and not (target / name).is_symlink():
                    (target / name).symlink_to(Path("..data") / name)
