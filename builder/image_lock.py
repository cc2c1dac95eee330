"""Write `builder/image.txt` and `builder/image_build.txt`: what the image has and what builds it, by SHA-256.

python builder/image_lock.py        # after a change of constraints.txt; asks pip, which asks its index

Versions are those of constraints.txt; wheels those for x86_64 and arm64 at the usual index, whatever the environment
says. The image has the Python of the Containerfile's BASE; it is built with that of an engine's image, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = "3.11"  # of the Containerfile's BASE
BUILDERS = (PYTHON, "3.12", "3.13")  # and of engines' images
PLATFORMS = ("x86_64", "aarch64")
HEAD = "# python builder/image_lock.py: versions of constraints.txt, wheels for Python {pythons} on {platforms}\n"


def wheels(requirements: list[str], python: str, platform: str) -> dict[str, tuple[str, str]]:
    """All that `requirements` take, by name: (version, SHA-256)."""
    tags = [f"--platform=manylinux_2_{minor}_{platform}" for minor in range(28, 16, -1)]
    tags += [f"--platform=manylinux2014_{platform}"]
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
            "--constraint", str(ROOT / "constraints.txt"), "--only-binary", ":all:", "--target", "unused",
            "--python-version", python, *tags, *requirements,
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        | {"PIP_CONFIG_FILE": os.devnull},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)["install"]
    return {
        each["metadata"]["name"]: (
            each["metadata"]["version"],
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in found
    }


def lock(requirements: list[str], pythons: tuple[str, ...]) -> str:
    found = [wheels(requirements, python, platform) for python in pythons for platform in PLATFORMS]
    text = HEAD.format(pythons=", ".join(pythons), platforms=" and ".join(PLATFORMS))
    for name in sorted(found[0], key=str.lower):
        (version,) = {each[name][0] for each in found}
        hashes = sorted({each[name][1] for each in found})
        text += f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes) + "\n"
    return text


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    base = (ROOT / "Containerfile").read_text(encoding="utf-8")
    assert re.search(rf"^ARG BASE=python:{re.escape(PYTHON)}-", base, re.M), "the base has another Python"
    needs = project["project"]
    sys.path.insert(0, str(ROOT / "builder"))
    from pdbus_build import get_requires_for_build_wheel

    builds = project["build-system"]["requires"] + get_requires_for_build_wheel()
    (ROOT / "builder" / "image_build.txt").write_text(lock(builds, BUILDERS))
    has = needs["dependencies"] + needs["optional-dependencies"]["serve"]
    (ROOT / "builder" / "image.txt").write_text(lock(has, (PYTHON,)))


if __name__ == "__main__":
    main()
