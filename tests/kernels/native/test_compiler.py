"""Compiling once; and what is said when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanoengine.kernels.native import compiler
from nanoengine.kernels.native.compiler import (
    LIBRARY,
    CannotCompile,
    compile_library,
    find_compiler,
    flags_for,
    is_safe,
)
from nanoengine.kernels.native.target import missing_features
from tests.kernels.marks import COMPILER, needs_compiler

FLAGS = ("-O0", "-fPIC")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two sources that share a header, each with a function of its name."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "common.h").write_text("#pragma once\nconstexpr int BASE = 40;\n")
    for name, more in (("two", 2), ("three", 3)):
        (folder / f"{name}.cpp").write_text(
            f'#include "common.h"\nextern "C" int {name}() {{ return BASE + {more}; }}\n'
        )
    (folder / "notes.txt").write_text("not a source")
    return folder


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every command that is started."""
    started: list[list[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, command: list[str], *args: Any, **options: Any):
            started.append(command)
            super().__init__(command, *args, **options)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return started


def answers(library: Path) -> tuple[int, int]:
    functions = ctypes.CDLL(str(library))
    return functions.two(), functions.three()


# ---- compiling


@needs_compiler
def test_all_sources_become_one_library_and_nothing_is_compiled_twice(
    sources: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    """Wherever they lie; and nothing but the library is left."""
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert answers(first) == (42, 43)
    assert len(commands) == 3, "each source, and then they are linked"
    moved = sources.rename(tmp_path / "moved")
    assert compile_library(moved, COMPILER, FLAGS, tmp_path / "cache") == first
    assert len(commands) == 3
    assert sorted((tmp_path / "cache").rglob("*")) == [first.parent, first]
    first.unlink()
    assert compile_library(moved, COMPILER, FLAGS, tmp_path / "cache") == first
    assert answers(first) == (42, 43)


@needs_compiler
@pytest.mark.parametrize("changed", ["two.cpp", "common.h"])
def test_a_changed_source_or_header_is_compiled_anew(sources: Path, tmp_path: Path, changed: str) -> None:
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    text = (sources / changed).read_text()
    (sources / changed).write_text(text.replace("BASE = 40", "BASE = 60").replace("+ 2", "+ 22"))
    second = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert second.parent != first.parent
    assert answers(second)[0] == 62
    assert answers(first) == (42, 43)
    (sources / changed).write_text(text)
    assert compile_library(sources, COMPILER, FLAGS, tmp_path / "cache") == first


@needs_compiler
def test_other_flags_compilers_and_cpus_have_folders_of_their_own(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other-compiler"
    other.write_text(f'#!/bin/sh\nexec "{COMPILER}" "$@"\n')
    other.chmod(0o755)
    ways = [(COMPILER, FLAGS), (COMPILER, (*FLAGS, "-DMORE")), (str(other), FLAGS)]
    found = [compile_library(sources, *way, tmp_path / "cache") for way in ways]
    monkeypatch.setattr(compiler, "_cpu", lambda: "a CPU that was never built")
    found.append(compile_library(sources, COMPILER, FLAGS, tmp_path / "cache"))
    assert len({library.parent for library in found}) == 4
    assert all(answers(library) == (42, 43) for library in found)


@needs_compiler
def test_a_product_is_rounded_before_it_is_added(tmp_path: Path) -> None:
    """Even where the CPU can do both at once: else a compiler would choose, loop by loop, what a number is."""
    if platform.machine() != "x86_64" or missing_features(("avx2", "fma")):
        pytest.skip("this CPU does not run x86-64-v3")
    (tmp_path / "sums.cpp").write_text(SUMS)
    path = compile_library(tmp_path, COMPILER, flags_for("x86-64-v3"), tmp_path / "cache")
    floats = ctypes.c_float * 33
    factors, sums = floats(*[1 + 2**-12] * 33), floats(*[-1 - 2**-11] * 33)
    ctypes.CDLL(str(path)).add_squares(factors, sums, 33)
    assert list(sums) == [0] * 33, "the 2**-24 of a square is lost"


SUMS = """
extern "C" void add_squares(const float* a, float* sums, int n) {
    for (int i = 0; i < n; i++) sums[i] = a[i] * a[i] + sums[i];
}
"""


# ---- failing


@needs_compiler
@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("int two() { return forty_two; }", FLAGS, r"could not compile two\.cpp: .*error.*forty_two"),
        (
            'extern "C" int three() { return 0; }',
            FLAGS,
            rf"could not compile {LIBRARY}: .*multiple definition of .three",
        ),
        ("", (*FLAGS, "--no-such-flag"), "no-such-flag"),
    ],
)
def test_what_fails_is_named_with_its_error_and_leaves_nothing_that_is_taken_for_a_library(
    sources: Path, tmp_path: Path, source: str, flags: tuple[str, ...], message: str
) -> None:
    good = (sources / "two.cpp").read_text()
    (sources / "two.cpp").write_text(source + "\n")
    for _ in range(2):
        with pytest.raises(CannotCompile, match=message):
            compile_library(sources, COMPILER, flags, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    (sources / "two.cpp").write_text(good)
    assert answers(compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")) == (42, 43)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("#!/bin/sh\nkill -9 $$\n", "could not compile t"),
        (
            f"#!{sys.executable}\nimport sys\nsys.stderr.write('a warning\\n' * 100_000)\nsys.exit('error: enough')\n",
            "error: enough",
        ),
        ("\x7fELF", "does not run"),
        ("no program", "does not run|could not compile"),
    ],
    ids=["dies", "has more to say than a pipe holds", "broken", "no program"],
)
def test_a_compiler_that_fails_is_an_error(sources: Path, tmp_path: Path, content: str, message: str) -> None:
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(content)
    stand_in.chmod(0o755)
    with pytest.raises(CannotCompile, match=message):
        compile_library(sources, str(stand_in), FLAGS, tmp_path / "cache")


@pytest.mark.parametrize(
    ("second", "most", "error"),
    [
        ("exec sleep 1000", 1, "CannotCompile: .* has not ended within 1 s"),
        ("exit 1", 100, "CannotCompile: .* could not compile"),
        ("kill -INT {this}; exec sleep 1000", 100, "KeyboardInterrupt"),
    ],
    ids=["hangs", "fails", "interrupted"],
)
def test_no_compiler_outlives_an_attempt_that_fails(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str, most: float, error: str
) -> None:
    """The first of two waits for a process that it has started, as g++ does."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(compiler, "MOST_SECONDS", most)
    stand_in, process = tmp_path / "stand-in", tmp_path / "process"
    first = f"sleep 1000 & echo $! > {tmp_path}/new; mv {tmp_path}/new {process}; wait"
    second = f"until [ -e {process} ]; do sleep 0.01; done; {second.format(this=os.getpid())}"
    stand_in.write_text(f"#!/bin/sh\nif mkdir {tmp_path}/started; then {first}; else {second}; fi\n")
    stand_in.chmod(0o755)
    end = time.monotonic() + 60
    with pytest.raises((CannotCompile, KeyboardInterrupt)) as raised:
        compile_library(sources, str(stand_in), FLAGS, tmp_path / "cache")
    assert re.match(error, f"{raised.typename}: {raised.value}")
    while _runs(process.read_text().strip()):  # a killed process ends when it has a CPU again
        assert time.monotonic() < end
        time.sleep(0.01)


def _runs(process: str) -> bool:
    """Whether a process is there, and not only its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@needs_compiler
def test_the_compiler_does_not_read_the_working_folder(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of a path of headers means that folder, and of a path of programs, too."""
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "cstddef").write_text("#error of somebody else\n")
    (sources / "two.cpp").write_text('#include <cstddef>\nextern "C" int two() { return 42; }\n')
    monkeypatch.chdir(tmp_path / "hostile")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", ":")
    assert answers(compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")) == (42, 43)
    install(tmp_path / "hostile", "c++")
    monkeypatch.setenv("PATH", ":.")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotCompile, match="no C"):
        find_compiler()


# ---- the folder


@needs_compiler
def test_several_may_compile_at_once(sources: Path, tmp_path: Path) -> None:
    """Threads here, as processes elsewhere: nothing is known of the others but what lies in the folder."""
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(compile_library, sources, COMPILER, FLAGS, tmp_path / "cache") for _ in range(4)]
        library, *others = [run.result() for run in runs]
    assert set(others) == {library}
    assert answers(library) == (42, 43)
    assert sorted((tmp_path / "cache").rglob("*")) == [library.parent, library]


@needs_compiler
@pytest.mark.parametrize("of_the_folder", [False, True])
def test_a_library_that_others_could_write_is_never_loaded(sources: Path, tmp_path: Path, of_the_folder: bool) -> None:
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert is_safe(library)
    (library.parent if of_the_folder else library).chmod(0o775)
    library.write_bytes(b"of somebody else")
    assert not is_safe(library)
    assert compile_library(sources, COMPILER, FLAGS, tmp_path / "cache") == library
    assert is_safe(library)
    assert answers(library) == (42, 43)


@needs_compiler
def test_the_folder_of_another_user_is_left_alone(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    own = os.geteuid()
    if own == 0:  # what is root's, everybody may load
        os.chown(planted.parent, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert not is_safe(planted)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert library.is_relative_to(tmp_path / "elsewhere")
    assert answers(library) == (42, 43)


# ---- the compiler


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A $PATH of one empty folder, and no $CXX."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def install(folder: Path, name: str) -> str:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


@pytest.mark.parametrize(
    ("there", "cxx", "found"),
    [
        *(([name], None, name) for name in ("c++", "g++", "clang++")),
        (["g++"], "", "g++"),
        (["c++", "my-compiler"], "my-compiler", "my-compiler"),
    ],
)
def test_the_compiler_is_the_one_that_is_named_or_any_that_is_known(
    programs: Path, monkeypatch: pytest.MonkeyPatch, there: list[str], cxx: str | None, found: str
) -> None:
    paths = {name: install(programs, name) for name in there}
    for value in (cxx, cxx and paths[cxx]):
        if value is not None:
            monkeypatch.setenv("CXX", value)
        assert find_compiler() == paths[found]


def test_without_a_compiler_the_names_that_were_tried_are_said(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $CXX that is not there is an error even if others are."""
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler.*c\+\+.*g\+\+.*clang\+\+"):
        find_compiler()
    install(programs, "c++")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(CannotCompile, match=r"/nowhere/c\+\+"):
        find_compiler()
