"""Compiling once; and what is said when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.kernels import compiler
from nanoengine.kernels.compiler import LIBRARY, CannotCompile, cache_folder, compile_library, find_compiler, flags_for
from nanoengine.kernels.target import missing_features

FLAGS = ("-O0", "-fPIC")

try:
    COMPILER = find_compiler()
except CannotCompile as no_compiler:
    COMPILER = str(no_compiler)
needs_compiler = pytest.mark.skipif(not os.path.isabs(COMPILER), reason=COMPILER)


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


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# ---- compiling


@needs_compiler
def test_all_sources_become_one_library(sources: Path, tmp_path: Path) -> None:
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert answers(library) == (42, 43)
    assert library.name == LIBRARY
    assert library.is_relative_to(tmp_path / "cache")


@needs_compiler
def test_nothing_is_compiled_twice(sources: Path, tmp_path: Path, commands: list[list[str]]) -> None:
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert len(commands) == 3, "each source, and then they are linked"
    before = sorted((tmp_path / "cache").rglob("*"))
    assert compile_library(sources, COMPILER, FLAGS, tmp_path / "cache") == first
    assert len(commands) == 3
    assert sorted((tmp_path / "cache").rglob("*")) == before


@needs_compiler
def test_the_same_sources_elsewhere_are_not_compiled_again(
    sources: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    moved = sources.rename(tmp_path / "moved")
    assert compile_library(moved, COMPILER, FLAGS, tmp_path / "cache") == first
    assert len(commands) == 3


@needs_compiler
def test_a_library_that_is_missing_is_compiled_again(sources: Path, tmp_path: Path) -> None:
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    library.unlink()
    assert compile_library(sources, COMPILER, FLAGS, tmp_path / "cache") == library
    assert answers(library) == (42, 43)


@needs_compiler
def test_nothing_but_the_library_is_left(sources: Path, tmp_path: Path) -> None:
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert sorted((tmp_path / "cache").rglob("*")) == [library.parent, library]


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
def test_other_flags_are_another_folder(sources: Path, tmp_path: Path) -> None:
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    second = compile_library(sources, COMPILER, (*FLAGS, "-DMORE"), tmp_path / "cache")
    assert second.parent != first.parent


@needs_compiler
def test_another_compiler_is_another_folder(sources: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-compiler"
    other.write_text(f'#!/bin/sh\nexec "{COMPILER}" "$@"\n')
    other.chmod(0o755)
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    second = compile_library(sources, str(other), FLAGS, tmp_path / "cache")
    assert second.parent != first.parent
    assert answers(second) == (42, 43)


@needs_compiler
def test_another_cpu_is_another_folder(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    monkeypatch.setattr(compiler, "_cpu", lambda: "a CPU that was never built")
    second = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert second.parent != first.parent


def test_the_target_is_a_flag() -> None:
    assert flags_for("x86-64-v3")[-1] == "-march=x86-64-v3"
    assert flags_for("native")[:-1] == flags_for("x86-64-v3")[:-1]


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
def test_a_source_that_does_not_compile_is_named_with_its_error(sources: Path, tmp_path: Path) -> None:
    (sources / "two.cpp").write_text("int two() { return forty_two; }\n")
    with pytest.raises(CannotCompile, match=r"could not compile two\.cpp: .*error.*forty_two"):
        compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")


@needs_compiler
def test_sources_that_cannot_be_linked_are_an_error_that_names_the_library(sources: Path, tmp_path: Path) -> None:
    (sources / "three.cpp").write_text((sources / "two.cpp").read_text())
    with pytest.raises(CannotCompile, match=rf"could not compile {LIBRARY}: .*multiple definition of .two"):
        compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert not files(tmp_path / "cache")


@needs_compiler
def test_an_unknown_flag_is_an_error_that_names_it(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotCompile, match="no-such-flag"):
        compile_library(sources, COMPILER, (*FLAGS, "--no-such-flag"), tmp_path / "cache")


@needs_compiler
def test_a_failure_leaves_nothing_that_is_taken_for_a_library(sources: Path, tmp_path: Path) -> None:
    good = (sources / "two.cpp").read_text()
    (sources / "two.cpp").write_text("broken\n")
    for _ in range(2):
        with pytest.raises(CannotCompile):
            compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert not files(tmp_path / "cache")
    (sources / "two.cpp").write_text(good)
    assert answers(compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")) == (42, 43)


def test_a_compiler_that_dies_without_a_word_is_an_error(sources: Path, tmp_path: Path) -> None:
    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o755)
    with pytest.raises(CannotCompile, match=r"could not compile t"):
        compile_library(sources, str(dying), FLAGS, tmp_path / "cache")


def test_a_compiler_with_much_to_say_is_heard_out(sources: Path, tmp_path: Path) -> None:
    """More than a pipe holds, from both of the sources."""
    chatty = tmp_path / "chatty"
    chatty.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stderr.write('a warning\\n' * 100_000)\nsys.exit('error: enough')\n"
    )
    chatty.chmod(0o755)
    with pytest.raises(CannotCompile, match="error: enough"):
        compile_library(sources, str(chatty), FLAGS, tmp_path / "cache")


@pytest.mark.parametrize("content", [b"\x7fELF", b"no program"])
def test_a_compiler_that_is_no_program_is_an_error(sources: Path, tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(content)
    broken.chmod(0o755)
    with pytest.raises(CannotCompile):
        compile_library(sources, str(broken), FLAGS, tmp_path / "cache")


# ---- the folder


@needs_compiler
@pytest.mark.parametrize("obstacle", ["a file", "no permission"])
def test_without_a_writable_folder_it_compiles_for_this_process(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    if obstacle == "a file":
        folder.write_text("where a folder should be")
    else:
        folder.mkdir(mode=0o500)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write everywhere")
    library = compile_library(sources, COMPILER, FLAGS, folder)
    assert answers(library) == (42, 43)
    assert library.is_relative_to(elsewhere)


@needs_compiler
def test_what_an_interrupted_compilation_left_does_no_harm(sources: Path, tmp_path: Path) -> None:
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    library.unlink()
    left = library.parent / "tmpabcdef"
    left.mkdir()
    (left / LIBRARY).write_bytes(b"half a lib")
    (left / "two.o").write_bytes(b"")
    assert compile_library(sources, COMPILER, FLAGS, tmp_path / "cache") == library
    assert answers(library) == (42, 43)


@needs_compiler
def test_two_processes_may_compile_at_once(sources: Path, tmp_path: Path) -> None:
    program = (
        "import ctypes, sys; from pathlib import Path; from nanoengine.kernels.compiler import compile_library;"
        "library = compile_library(Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[4:]), Path(sys.argv[3]));"
        "functions = ctypes.CDLL(str(library)); print(functions.two(), functions.three())"
    )
    arguments = [sys.executable, "-c", program, str(sources), COMPILER, str(tmp_path / "cache"), *FLAGS]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0].strip() for process in processes] == ["42 43"] * 4
    library = compile_library(sources, COMPILER, FLAGS, tmp_path / "cache")
    assert sorted((tmp_path / "cache").rglob("*")) == [library.parent, library]


def test_the_cache_is_where_the_user_wants_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_folder().is_relative_to(tmp_path / "elsewhere")
    for unset in (None, ""):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if unset is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder().is_relative_to(tmp_path / "home" / ".cache")


# ---- the compiler


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A $PATH of one empty folder, and no $CXX."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def install(folder: Path, name: str) -> str:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_any_known_compiler_will_do(programs: Path, name: str) -> None:
    path = install(programs, name)
    assert find_compiler() == path


@pytest.mark.parametrize("by_path", [False, True])
def test_cxx_says_which_compiler(programs: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool) -> None:
    install(programs, "c++")
    path = install(programs, "my-compiler")
    monkeypatch.setenv("CXX", path if by_path else "my-compiler")
    assert find_compiler() == path


def test_an_empty_cxx_says_nothing(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = install(programs, "g++")
    monkeypatch.setenv("CXX", "")
    assert find_compiler() == path


def test_without_any_compiler_the_names_that_were_tried_are_said(programs: Path) -> None:
    assert programs.is_dir()
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler.*c\+\+.*g\+\+.*clang\+\+"):
        find_compiler()


def test_a_cxx_that_is_not_there_is_an_error_even_if_others_are(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "c++")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(CannotCompile, match=r"/nowhere/c\+\+"):
        find_compiler()
