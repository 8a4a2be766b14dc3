"""Which library is loaded, for which CPU."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native import libraries, target
from nanoengine.kernels.native.compiler import LIBRARY, CannotCompile, compile_library
from nanoengine.kernels.native.libraries import Library, best_prebuilt, must_compile
from tests.kernels.marks import COMPILER, needs_compiler

NEW, OLD = ("x86-64-v4", "x86-64-v3") if platform.machine() == "x86_64" else ("armv9-a", "armv8-a")
"""Targets in place of those of wheels: this CPU does not run the new one."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source in place of the kernels, a cache of its own, and nothing prebuilt."""
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(libraries, "SOURCES", tmp_path / "cpp")
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path / "prebuilt")
    for module in (libraries, target):
        monkeypatch.setattr(module, "PREBUILT_TARGETS", {platform.machine(): {NEW: ("fast",), OLD: ()}})
        monkeypatch.setattr(module, "missing_features", lambda flags: [*flags])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOENGINE_CPU", raising=False)
    libraries._made.cache_clear()
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")


def prebuild(folder: Path, name: str) -> None:
    """A library as a wheel brings it, compiled for the target of this name."""
    made = folder / f"sources-{name}"
    made.mkdir()
    (made / "tiny.cpp").write_text('extern "C" int answer() { return 43; }\n')
    library = compile_library(made, COMPILER, ("-O0", "-fPIC"), folder / "made")
    (folder / "prebuilt" / name).mkdir(parents=True)
    library.rename(folder / "prebuilt" / name / LIBRARY)


def load() -> Library:
    libraries._made.cache_clear()
    return libraries.load_library.__wrapped__()


# ---- compiled here


@needs_compiler
def test_they_are_compiled_for_this_cpu_or_for_the_one_that_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "prebuilt" / OLD).mkdir(parents=True)  # passed over, where there is a compiler
    loaded = load()
    assert (loaded.functions.answer(), loaded.description) == (42, "compiled for this CPU")
    monkeypatch.setenv("NANOENGINE_CPU", OLD)
    assert load().description == f"compiled for {OLD}"
    assert len(list((folder / "cache").rglob(LIBRARY))) == 2, "each has its place"


def test_a_cpu_that_is_not_known_or_whose_kernels_do_not_run_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reason in (("no-such-cpu", "one of native"), (NEW, "no fast")):
        monkeypatch.setenv("NANOENGINE_CPU", name)
        with pytest.raises(InvalidConfig, match=f"NANOENGINE_CPU is '{name}'.*{reason}"):
            load()


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = folder / LIBRARY
    torn.write_bytes(b"torn")
    monkeypatch.setattr(libraries, "compile_library", lambda *_: torn)
    with pytest.raises(CannotCompile, match="cannot be loaded"):
        load()


@needs_compiler
def test_what_is_kept_need_not_be_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert must_compile()
    load()
    assert not must_compile()
    (folder / "cpp" / "tiny.cpp").write_text('extern "C" int answer() { return 44; }\n')
    assert must_compile()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert not must_compile(), "nobody could"


@needs_compiler
def test_what_cannot_be_kept_leaves_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("a file, where a folder should be")
    (folder / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    assert load().functions.answer() == 42
    assert not [*(folder / "temporary").iterdir()]


def test_a_compiler_that_fails_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that need kernels while an engine starts, and by engine after engine. Another compiler has a try of its own."""
    for name in ("one", "other"):
        (folder / name).write_text(
            f"#!/bin/sh\necho asked >> {folder}/asked\necho error: {name} is broken >&2\nexit 1\n"
        )
        (folder / name).chmod(0o755)
        monkeypatch.setenv("CXX", str(folder / name))
        for _ in range(3):
            with pytest.raises(CannotCompile, match=f"tiny.cpp: error: {name} is broken"):
                libraries.load_library.__wrapped__()
    assert (folder / "asked").read_text().split() == ["asked"] * 2


# ---- prebuilt


@needs_compiler
def test_without_a_compiler_or_if_it_fails_they_are_those_of_the_wheel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuild(folder, OLD)
    (folder / "cpp" / "tiny.cpp").write_text("broken\n")
    assert "could not compile tiny.cpp" in load().description
    monkeypatch.setenv("CXX", "/nowhere/c++")
    loaded = load()
    assert loaded.functions.answer() == 43
    assert loaded.description.startswith(f"prebuilt for {OLD}: no C++ compiler")
    assert "/nowhere/c++" in loaded.description


@pytest.mark.usefixtures("no_compiler")
def test_without_any_the_reason_is_that_of_the_compiler_and_a_second_one_if_some_cannot_be_loaded(folder: Path) -> None:
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler.*/nowhere/c\+\+"):
        load()
    (folder / "prebuilt" / OLD).mkdir(parents=True)
    (folder / "prebuilt" / OLD / LIBRARY).write_bytes(b"torn")
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler.*, and .*cannot be loaded"):
        load()


@pytest.mark.usefixtures("no_compiler")
def test_a_named_cpu_without_kernels_is_an_error_and_nothing_else_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "prebuilt" / "another").mkdir(parents=True)
    monkeypatch.setenv("NANOENGINE_CPU", OLD)
    with pytest.raises(InvalidConfig, match=rf"NANOENGINE_CPU is '{OLD}'.*no prebuilt.*no C\+\+ compiler.*unset"):
        load()


def test_the_best_that_the_wheel_holds_and_the_cpu_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_prebuilt("native") is None
    for name in (OLD, NEW):
        (folder / "prebuilt" / name).mkdir(parents=True)
    assert best_prebuilt("native") == best_prebuilt(OLD) == OLD
    assert best_prebuilt(NEW) is None
    monkeypatch.setattr(libraries, "missing_features", lambda _: [])
    assert best_prebuilt("native") == best_prebuilt(NEW) == NEW
    assert best_prebuilt(OLD) == OLD
    assert best_prebuilt("other") is None
    (folder / "prebuilt" / NEW).rmdir()
    assert best_prebuilt("native") == OLD
