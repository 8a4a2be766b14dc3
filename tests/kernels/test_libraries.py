"""Which libraries are loaded, for which CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.kernels import libraries
from nanoengine.kernels.compiler import CannotCompile, find_compiler
from nanoengine.kernels.libraries import Libraries

try:
    COMPILER = find_compiler()
except CannotCompile as no_compiler:
    COMPILER = str(no_compiler)
needs_compiler = pytest.mark.skipif(not os.path.isabs(COMPILER), reason=COMPILER)


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small source in place of the kernels, and a cache of its own."""
    (tmp_path / "cpp").mkdir()
    (tmp_path / "cpp" / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(libraries, "SOURCES", tmp_path / "cpp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NANOENGINE_CPU", raising=False)


def load() -> Libraries:
    return libraries.load_libraries.__wrapped__()


@needs_compiler
def test_they_are_compiled_for_this_cpu() -> None:
    loaded = load()
    assert loaded.by_source["tiny"].answer() == 42
    assert loaded.description == "compiled for this CPU"


@needs_compiler
def test_or_for_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"x86_64": "x86-64", "aarch64": "armv8-a"}.get(os.uname().machine)
    if name is None:
        pytest.skip(f"no name of a CPU is known for {os.uname().machine}")
    load()
    monkeypatch.setenv("NANOENGINE_CPU", name)
    assert load().description == f"compiled for {name}"
    assert len(list((tmp_path / "cache").rglob("tiny.so"))) == 2, "each has its place"


@needs_compiler
def test_a_name_that_no_compiler_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOENGINE_CPU", "no-such-cpu")
    with pytest.raises(InvalidConfig, match="NANOENGINE_CPU is 'no-such-cpu'"):
        load()


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = tmp_path / "tiny.so"
    torn.write_bytes(b"torn")
    monkeypatch.setattr(libraries, "compile_all", lambda *_: {"tiny": torn})
    with pytest.raises(CannotCompile, match="cannot be loaded"):
        load()
