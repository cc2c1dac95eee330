"""The build backend: setuptools, and wheels whose cores mypyc has compiled.

Such a wheel has the same sources beside what was compiled from them; it is for one version of Python and one platform.
Where compiling fails, or PDBUS_PURE is set, the wheel is pure Python, with one warning that says why. Editable installs
and sdists are setuptools' own: nobody runs what was built before their last edit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from setuptools import Extension, build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

HERE = Path(__file__).parent
MODULES = (HERE / "compiled.txt").read_text().split()
# mypyc, and what it has to know the types of: what these modules import. Without one of those they are slower.
REQUIRES = ["mypy>=2.4,<2.5", "pyzmq>=26.2", "msgspec>=0.19", "structlog>=24.1", "prometheus-client>=0.20"]
GROUP = "pdbus"  # one library, pdbus__mypyc, holds them all
extensions: list[Extension] = []  # what setup.py hands to setuptools


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    plain = build_meta.get_requires_for_build_wheel(config_settings)
    return plain if _unwanted() else [*plain, *REQUIRES]


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    arguments = wheel_directory, config_settings, metadata_directory
    why = _unwanted()
    if not why:
        try:
            with _place() as place:
                extensions[:] = _cores(place)
                return build_meta.build_wheel(*arguments)
        except (Exception, SystemExit) as error:  # mypyc and distutils leave with either
            why = f"they could not be compiled ({type(error).__name__}: {str(error)[:200]})"
        finally:
            extensions.clear()
    print(f"warning: the cores of pdbus stay pure Python, which is slower: {why}", file=sys.stderr)
    with _place():
        return build_meta.build_wheel(*arguments)


def _unwanted() -> str:
    return "PDBUS_PURE is set" if os.environ.get("PDBUS_PURE") else ""


@contextmanager
def _place() -> Iterator[Path]:
    """An empty folder to build in, its path relative, as setuptools wants that of sources: what an earlier build left
    in `build` would get into the wheel."""
    os.makedirs("build", exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir="build") as made:
            place = Path(os.path.relpath(made))
            settings = place / "setup.cfg"
            settings.write_text(f"[build]\nbuild_base = {place}\n")
            os.environ["DIST_EXTRA_CONFIG"] = str(settings)
            yield place
    finally:
        os.environ.pop("DIST_EXTRA_CONFIG", None)
        with suppress(OSError):
            os.rmdir("build")


def _cores(place: Path) -> list[Extension]:
    from mypyc.build import mypycify

    version = "{}.{}".format(*sys.version_info)
    found: list[Extension] = mypycify(
        [
            *MODULES,
            "--config-file=",  # the project's own is for those who change it
            f"--python-version={version}",
            f"--cache-dir={place / 'types'}",
            "--ignore-missing-imports",
            "--follow-imports=silent",  # what is wrong in modules that stay as they are is nothing to stop for
        ],
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "2"),  # 0: slower cores in half the time, as tests of a build want
        debug_level="0",
        multi_file=True,
        target_dir=str(place / "c"),
        group_name=GROUP,
    )
    for extension in found:  # other compilers warn of other things
        extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
    return found
