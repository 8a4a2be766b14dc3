"""The CPU that native kernels are made for: the one at hand, or an older one that $NANOENGINE_CPU names."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from nanoengine.errors import InvalidConfig, shown
from nanoengine.kernels.native.compiler import NATIVE, PREBUILT_TARGETS

VARIABLE = "NANOENGINE_CPU"


def wanted_target() -> str:
    """The CPU that kernels are to be made for, as -march names it."""
    return os.environ.get(VARIABLE) or NATIVE


def check_target(target: str) -> None:
    """See that a target is known on this machine, and that this CPU has the instructions that code for it may use.

    Raises:
        InvalidConfig: one of them is not so; the message says which targets there are, or what is missing.
    """
    if target == NATIVE:
        return
    known = PREBUILT_TARGETS.get(platform.machine(), {})
    if target not in known:
        raise InvalidConfig(
            f"{VARIABLE} is {shown(target)}: on this machine it must be one of {', '.join((NATIVE, *known))}"
        )
    if missing := missing_features(known[target]):
        raise InvalidConfig(f"{VARIABLE} is {shown(target)}, but this CPU has no {', '.join(missing)}: unset it")


def missing_features(needed: Iterable[str]) -> list[str]:
    """The instructions that this CPU does not have, in the names of /proc/cpuinfo; all of them where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    there = line[1].split() if line else []
    return [flag for flag in needed if flag not in there]
