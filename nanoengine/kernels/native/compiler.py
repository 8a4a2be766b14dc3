"""Compiling the native kernels, once: the library is stored in the user's cache folder under a hash of all that it is made of
(sources, flags, compiler, CPU). Its last bytes are a checksum, for a library that was cut off kills whoever loads it; and only
what nobody else could write is loaded.

setup.py, which compiles it for wheels, runs this file alone: it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
FLAGS = ("-std=c++20", "-O3", "-pthread", "-fPIC", "-fno-strict-aliasing", "-Wno-psabi", "-ffp-contract=off")
"""Contraction would let the compiler choose, loop by loop, where a product and a sum are rounded once: see simd.h."""
COMPILERS = ("c++", "g++", "clang++")
LIBRARY = "kernels.so"
NATIVE = "native"
"""The target that is the CPU at hand."""

MOST_SECONDS = 900
"""A compiler that has not ended by then hangs: others take 15 to 90 s."""

CHECKSUM_BYTES = 16
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

PREBUILT = Path(__file__).parent / "prebuilt"
AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
PREBUILT_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"x86-64-v4": AVX2 + AVX512, "x86-64-v3": AVX2},
    "aarch64": {"armv8-a": ()},
}
"""Machine -> the targets that wheels for it hold kernels of, the best first, and what they need in the names of /proc/cpuinfo."""


class CannotCompile(Exception):
    """No compiler, or it failed; the message says which."""


def flags_for(target: str) -> tuple[str, ...]:
    """The flags that kernels are compiled with for a CPU, by the name that -march has for it."""
    return *FLAGS, f"-march={target}"


def find_compiler() -> str:
    """Path of the C++ compiler: the one in $CXX, or the first one known.

    Raises:
        CannotCompile: there is none.
    """
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    folders = os.pathsep.join(filter(os.path.isabs, os.get_exec_path()))  # others would begin at the working folder
    for name in names:
        path = shutil.which(name, path=folders)
        if path:
            return os.path.abspath(path)
    raise CannotCompile(f"no C++ compiler ({', '.join(names)}) is installed")


def compile_library(
    sources: Path, compiler: str, flags: tuple[str, ...], folder: Path, link: tuple[str, ...] = ("-shared",)
) -> Path:
    """Compile every .cpp in `sources` into one library, and keep it below `folder`; if it is there, do nothing.

    Raises:
        CannotCompile: the compiler failed.
    """
    sources, folder = sources.absolute(), folder.absolute()
    library = cached_library(sources, compiler, flags, folder, link)
    if is_sound(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        facts = library.parent.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise PermissionError(f"{library.parent} is not a folder of this user")
        library.parent.chmod(0o755)  # nobody else writes there from now on, and what others have put there is not sound
        workplace = Path(tempfile.mkdtemp(dir=library.parent))
    except OSError:  # a read-only home, or somebody else's: compile for this process alone
        try:
            library = Path(tempfile.mkdtemp(prefix="nanoengine-kernels-"), LIBRARY)
            workplace = Path(tempfile.mkdtemp(dir=library.parent))
        except OSError as error:
            raise CannotCompile(f"there is no folder to compile in: {error}") from error
    try:
        objects = {path: workplace / f"{path.stem}.o" for path in sorted(sources.glob("*.cpp"))}
        largest_first = sorted(objects.items(), key=lambda entry: entry[0].stat().st_size, reverse=True)
        _run_all(
            compiler, {entry.name: (*flags, "-c", str(entry), "-o", str(to)) for entry, to in largest_first}, workplace
        )
        made = workplace / library.name
        _run_all(compiler, {library.name: (*flags, *link, *map(str, objects.values()), "-o", str(made))}, workplace)
        checksum = _checksum(made.read_bytes())
        with open(made, "ab") as file:
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
        made.chmod(0o755)
        os.replace(made, library)  # at once: another process may be doing the same
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return library


def is_sound(library: Path) -> bool:
    """Whether a cached library exists, is whole, and belongs to this user or root alone."""
    try:
        of_folder, of_file = library.parent.lstat(), library.lstat()
        for facts in (of_folder, of_file):
            if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & OTHERS_MAY_WRITE:
                return False
        content = library.read_bytes() if stat.S_ISDIR(of_folder.st_mode) and stat.S_ISREG(of_file.st_mode) else b""
    except OSError:
        return False
    return len(content) > CHECKSUM_BYTES and _checksum(content[:-CHECKSUM_BYTES]) == content[-CHECKSUM_BYTES:]


def cached_library(
    sources: Path, compiler: str, flags: tuple[str, ...], folder: Path, link: tuple[str, ...] = ("-shared",)
) -> Path:
    """Where `compile_library` keeps the library, be it there or not."""
    return folder / _fingerprint(sources, compiler, (*flags, *link)) / LIBRARY


def _run_all(compiler: str, commands: dict[str, tuple[str, ...]], folder: Path) -> None:
    """Run the compiler in `folder` with the arguments for each file that is to be made of, or is made; one for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running, end = (
        list(commands.items()),
        dict[str, subprocess.Popen[bytes]](),
        time.monotonic() + MOST_SECONDS,
    )
    try:
        while waiting or running:
            if waiting and len(running) < cores:
                name, arguments = waiting.pop(0)
                with open(folder / f"{name}.log", "wb") as log:
                    running[name] = subprocess.Popen(
                        [compiler, *arguments],
                        cwd=folder,  # the user's working folder may be anybody's
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        start_new_session=True,  # it can be ended with all that it has started
                    )
            elif ended := [name for name, job in running.items() if job.poll() is not None]:
                for name in ended:
                    if running.pop(name).returncode:
                        raise CannotCompile(f"{compiler} could not compile {name}: {_reason(folder / f'{name}.log')}")
            elif time.monotonic() > end:
                raise CannotCompile(f"{compiler} has not ended within {MOST_SECONDS} s")
            else:
                time.sleep(0.01)
    except OSError as error:
        raise CannotCompile(f"{compiler} does not run: {error}") from error
    finally:
        for job in running.values():
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def _reason(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if "ld returned" not in line]  # that says no reason
    return next((line for line in lines if "error" in line or "definition" in line), text[:200]).strip()


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()


def _fingerprint(sources: Path, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(sources.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    stat = os.stat(compiler)
    digest.update(repr((flags, compiler, stat.st_size, stat.st_mtime_ns, _cpu())).encode())
    return digest.hexdigest()


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = ("flags", "Features", "model", "model name", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in named)
