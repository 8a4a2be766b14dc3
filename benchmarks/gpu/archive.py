"""Triton's compiled kernels as one file, so that a machine that begins with nothing need not compile them again."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

NAME = "triton.tar.gz"

MOST_BYTES = 15 << 20
"""Of an archive."""

INTERMEDIATE = {".source", ".ttir", ".ttgir", ".llir", ".ptx", ".sass", ".gsan"}
"""Suffixes of what only the compiler reads."""

GROUP = "__grp__"
"""Files of this prefix list the others of a kernel, by their paths."""


def pack(cache: Path, archive: Path) -> int:
    """Write kernels, the smallest first, until the archive is full; returns how many it has no room for.

    A kernel is a folder, and goes whole or not at all.
    """
    kernels = {folder: _files(folder) for folder in cache.iterdir() if folder.is_dir()} if cache.is_dir() else {}
    left_out, new = 0, archive.with_suffix(".new")
    with new.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for folder, files in sorted(kernels.items(), key=lambda item: sum(file.stat().st_size for file in item[1])):
            if raw.tell() + sum(file.stat().st_size for file in files) > MOST_BYTES:
                left_out += 1
                continue
            for file in files:
                tar.add(file, arcname=f"{folder.name}/{file.name}")
    os.replace(new, archive)  # at once: half an archive is none
    return left_out


def unpack(archive: Path, cache: Path) -> None:
    """Put the kernels into a cache, wherever that lies here; those that it has already stay."""
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        there = {folder.name for folder in cache.iterdir()}
        members = [member for member in tar.getmembers() if member.name.split("/")[0] not in there]
        tar.extractall(cache, members, filter="data")
    for name in {member.name.split("/")[0] for member in members}:
        for group in (cache / name).glob(f"{GROUP}*"):
            listed = json.loads(group.read_text())["child_paths"]
            paths = {file: str(group.parent / file) for file in listed if (group.parent / file).exists()}
            group.write_text(json.dumps({"child_paths": paths}))


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file() and file.suffix not in INTERMEDIATE]
