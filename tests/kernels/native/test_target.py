"""The CPU that kernels are compiled for: what the compiler and this CPU have to say about a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native import target
from nanoengine.kernels.native.target import check_target, cpu_flags, missing_features, wanted_target

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe pni ssse3 sse4_1 sse4_2 popcnt"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A stand-in, which knows three targets as a compiler does."""
    path = tmp_path / "compiler"
    path.write_text(
        """#!/bin/sh
case "$1" in
    -march=avx2) echo '#define __AVX2__ 1'; echo '#define __FMA__ 1'; echo '#define __SHA__ 1';;
    -march=avx512) printf '#define __AVX2__ 1\\n#define __AVX512F__ 1\\n#define __AVX512VBMI2__ 1\\n#define __LZCNT__ 1\\n';;
    -march=arm) echo '#define __ARM_FEATURE_SVE 1'; echo '#define __ARM_FEATURE_DOTPROD 1';;
    *) echo "note: listening" >&2; echo "cc1plus: error: bad value for '-march=' switch" >&2; exit 1;;
esac
"""
    )
    path.chmod(0o755)
    return str(path)


def has(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setattr(target, "cpu_flags", flags.split)


def test_the_environment_names_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("x86-64-v3", "x86-64-v3"), ("", "native")):
        monkeypatch.setenv("NANOENGINE_CPU", value)
        assert wanted_target() == wanted
    monkeypatch.delenv("NANOENGINE_CPU")
    assert wanted_target() == "native"


def test_a_target_that_compiler_and_cpu_know_passes(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, V3)
    check_target("avx2", compiler)  # SHA is nothing that our code would use
    has(monkeypatch, f"{V4} avx512_vbmi2")
    check_target("avx512", compiler)
    has(monkeypatch, "fp asimd sve asimddp")
    check_target("arm", compiler)


@pytest.mark.parametrize(
    ("name", "flags", "missing"),
    [
        ("avx512", V3, r"avx512f, avx512vbmi2"),
        ("avx512", V4, r"no avx512vbmi2:"),
        ("avx2", "pni ssse3", "fma, avx2"),
        ("avx2", "", "avx2"),
        ("arm", "fp asimd asimddp", "no sve:"),
    ],
)
def test_what_the_cpu_lacks_is_named(
    compiler: str, monkeypatch: pytest.MonkeyPatch, name: str, flags: str, missing: str
) -> None:
    has(monkeypatch, flags)
    with pytest.raises(InvalidConfig, match=f"NANOENGINE_CPU is '{name}', but this CPU has .*{missing}.*unset"):
        check_target(name, compiler)


def test_a_name_that_the_compiler_refuses_is_an_error_with_its_reason(compiler: str) -> None:
    with pytest.raises(InvalidConfig, match=r"NANOENGINE_CPU is 'zen99', which .*compiler refuses: .*bad value.*unset"):
        check_target("zen99", compiler)


def test_a_compiler_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"NANOENGINE_CPU is 'x86-64-v3', but .*nowhere does not run"):
        check_target("x86-64-v3", str(tmp_path / "nowhere"))


def test_the_cpu_at_hand_needs_no_check_and_underscores_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "")
    check_target("native", "/nowhere")
    has(monkeypatch, "sse4_1 avx512_vbmi2")
    assert missing_features(["sse41", "avx512vbmi2", "avx_512f"]) == ["avx_512f"]


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2 fma", "Features\t: fpu avx2 fma", None])
def test_flags_are_those_of_the_first_cpu(monkeypatch: pytest.MonkeyPatch, line: str | None) -> None:
    """A system that does not say has none."""

    def read_text(_: Path) -> str:
        if line is None:
            raise FileNotFoundError
        return f"processor\t: 0\nvmx flags\t: other\n{line}\n\nprocessor\t: 1\nflags\t: none\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    assert cpu_flags() == (["fpu", "avx2", "fma"] if line else [])
