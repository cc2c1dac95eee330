"""What is unpacked is the pinned package, and nothing else is."""

from __future__ import annotations

import io
import lzma
import tarfile
from hashlib import sha256
from pathlib import Path

import environment
import pytest
from environment import PINS, Unavailable, judged, members, pin, unpack, upstream


def package(**programs: bytes) -> bytes:
    """A .deb with these programs."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in programs.items():
            info = tarfile.TarInfo(f"./usr/bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    parts = {"debian-binary": b"2.0\n", "data.tar.xz": lzma.compress(packed.getvalue())}
    archive = b"!<arch>\n"
    for name, content in parts.items():
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        archive += b"\n" * (len(content) % 2)
    return archive


def test_the_programs_are_unpacked(tmp_path: Path) -> None:
    unpack(package(prometheus=b"odd", promtool=b"even"), tmp_path)
    assert (tmp_path / "prometheus").read_bytes() == b"odd"
    assert (tmp_path / "promtool").stat().st_mode & 0o111


def test_what_is_no_package_is_refused() -> None:
    with pytest.raises(Unavailable, match="no Debian package"):
        members(b"<html>")


def test_another_content_under_the_pinned_name_is_refused() -> None:
    wanted = ("1.2+ds-3", "amd64", sha256(b"it").hexdigest())
    judged(b"it", "prometheus_1.2+ds-3_amd64.deb", wanted)
    judged(b"of another architecture: apt has checked it", "prometheus_1.2+ds-3_arm64.deb", wanted)
    with pytest.raises(Unavailable, match=r"pins\.txt says"):
        judged(b"something else", "prometheus_1.2+ds-3_amd64.deb", wanted)


def test_where_it_can_not_be_had_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDBUS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=rf"{upstream(pin(PINS.read_text())[0])} of https://prometheus.io") as raised:
        environment.programs()
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("prometheus-*/*")), "nothing half made is left"
