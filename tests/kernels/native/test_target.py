"""The CPU that kernels are made for: which names there are, and what this CPU lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoengine.errors import InvalidConfig
from nanoengine.kernels.native import target
from nanoengine.kernels.native.target import check_target, missing_features, wanted_target


def has(monkeypatch: pytest.MonkeyPatch, line: str | None) -> None:
    """What /proc/cpuinfo says of the first CPU; None: there is no such file."""

    def read_text(_: Path) -> str:
        if line is None:
            raise FileNotFoundError
        return f"processor\t: 0\nvmx flags\t: other\n{line}\n\nprocessor\t: 1\nflags\t: none\n"

    monkeypatch.setattr(Path, "read_text", read_text)


def test_the_environment_names_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("x86-64-v3", "x86-64-v3"), ("", "native")):
        monkeypatch.setenv("NANOENGINE_CPU", value)
        assert wanted_target() == wanted
    monkeypatch.delenv("NANOENGINE_CPU")
    assert wanted_target() == "native"


def test_a_target_is_known_on_this_machine_and_all_that_the_cpu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: "x86_64")
    has(monkeypatch, "flags\t\t: fpu avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw")
    check_target("native")
    check_target("x86-64-v3")
    with pytest.raises(
        InvalidConfig, match=r"NANOENGINE_CPU is 'x86-64-v4', but .*no avx512cd, avx512dq, avx512vl: unset"
    ):
        check_target("x86-64-v4")
    with pytest.raises(InvalidConfig, match=r"'zen99': .* one of native, x86-64-v4, x86-64-v3"):
        check_target("zen99")


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx2 fma", "Features\t: fpu avx2 fma", None])
def test_instructions_are_those_of_the_first_cpu(monkeypatch: pytest.MonkeyPatch, line: str | None) -> None:
    has(monkeypatch, line)
    assert missing_features(["avx2", "none"]) == (["none"] if line else ["avx2", "none"])
