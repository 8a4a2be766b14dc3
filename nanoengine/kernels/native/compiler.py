"""Compiling the native kernels, once: the library is stored in the user's cache folder under a hash of all that it is made of
(sources, flags, compiler, CPU). Only what nobody else could write is loaded.

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
from concurrent.futures import ThreadPoolExecutor, as_completed
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


def compile_library(sources: Path, compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Compile every .cpp in `sources` into one library, and keep it below `folder`; if it is there, do nothing.

    Args:
        flags: of the compiler, which takes them when it links, too.

    Raises:
        CannotCompile: the compiler failed.
    """
    sources, folder = sources.absolute(), folder.absolute()
    library = cached_library(sources, compiler, flags, folder)
    if is_safe(library):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        if library.parent.lstat().st_uid != os.geteuid():
            raise PermissionError(f"{library.parent} is not a folder of this user")
        library.parent.chmod(0o755)  # nobody else writes there from now on
        workplace = Path(tempfile.mkdtemp(dir=library.parent))
    except OSError:  # a read-only home, or somebody else's: compile for this process alone
        try:
            library = Path(tempfile.mkdtemp(prefix="nanoengine-kernels-"), LIBRARY)
            workplace = Path(tempfile.mkdtemp(dir=library.parent))
        except OSError as error:
            raise CannotCompile(f"there is no folder to compile in: {error}") from error
    try:
        objects = {path: str(workplace / f"{path.stem}.o") for path in sources.glob("*.cpp")}
        largest_first = sorted(objects, key=lambda path: path.stat().st_size, reverse=True)
        _run_all(
            compiler, {path.name: (*flags, "-c", str(path), "-o", objects[path]) for path in largest_first}, workplace
        )
        made = workplace / library.name
        _run_all(compiler, {library.name: (*flags, "-shared", *sorted(objects.values()), "-o", str(made))}, workplace)
        made.chmod(0o755)
        with open(made, "rb") as file:
            os.fsync(file.fileno())  # one that was cut off would kill whoever loads it
        os.replace(made, library)  # at once: another process may be doing the same
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return library


def is_safe(library: Path) -> bool:
    """Whether a cached library exists, and nobody but this user or root could write it."""
    try:
        entries = library.parent.lstat(), library.lstat()
    except OSError:
        return False
    return all(entry.st_uid in (os.geteuid(), 0) and not entry.st_mode & OTHERS_MAY_WRITE for entry in entries)


def cached_library(sources: Path, compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Where `compile_library` keeps the library, be it there or not."""
    return folder / _fingerprint(sources, compiler, (*flags, "-shared")) / LIBRARY


def _run_all(compiler: str, commands: dict[str, tuple[str, ...]], folder: Path) -> None:
    """Run the compiler in `folder` with the arguments for each file that is to be made of, or is made; one for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(cores) as pool:
        runs = {pool.submit(_run, compiler, arguments, folder, jobs): name for name, arguments in commands.items()}
        try:
            for run in as_completed(runs, MOST_SECONDS):
                if reason := run.result():
                    raise CannotCompile(f"{compiler} could not compile {runs[run]}: {reason}")
        except TimeoutError as error:
            raise CannotCompile(f"{compiler} has not ended within {MOST_SECONDS} s") from error
        except OSError as error:
            raise CannotCompile(f"{compiler} does not run: {error}") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for job in jobs:
                if job.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)  # with all that it has started


def _run(compiler: str, arguments: tuple[str, ...], folder: Path, jobs: list[subprocess.Popen[bytes]]) -> str | None:
    """The reason that it failed; None if it did not. It is in `jobs` while it runs."""
    command = [compiler, *arguments]  # not in the user's working folder, which may be anybody's
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdin=null, stdout=null, stderr=pipe, start_new_session=True) as job:
        jobs.append(job)
        text = job.communicate()[1].decode(errors="replace")
    lines = [line for line in text.splitlines() if "ld returned" not in line]  # that says no reason
    reason = next((line for line in lines if "error" in line or "definition" in line), text[:200]).strip()
    return reason or "it says no reason" if job.returncode else None


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
