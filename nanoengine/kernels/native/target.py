"""The CPU that native kernels are compiled for: the one at hand, or the one that $NANOENGINE_CPU names."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from nanoengine.errors import InvalidConfig, shown
from nanoengine.kernels.native.compiler import NATIVE

VARIABLE = "NANOENGINE_CPU"
WAY_OUT = (
    f"give {VARIABLE} another name that -march takes, such as x86-64-v3 (AVX2) or x86-64-v4 (AVX-512), or unset it"
)

X86 = (
    "SSE3 SSSE3 SSE4_1 SSE4_2 SSE4A POPCNT LZCNT MOVBE BMI BMI2 F16C FMA FMA4 XOP TBM GFNI APX_F AVX AVX2 AVXVNNI AVXIFMA "
    "AVXNECONVERT AVXVNNIINT8 AVXVNNIINT16 AVX512F AVX512CD AVX512BW AVX512DQ AVX512VL AVX512IFMA AVX512VBMI AVX512VBMI2 "
    "AVX512VNNI AVX512BITALG AVX512VPOPCNTDQ AVX512BF16 AVX512FP16 AMX_TILE AMX_INT8 AMX_BF16"
)
"""What a compiler or the kernels may use of a CPU, each of them a macro of the compiler: __AVX2__. Left out are instructions that
code must ask for and ours does not: GCC 12 takes one of them for granted that a Sapphire Rapids does not have."""

LINUX_NAMES = {"SSE3": "pni", "LZCNT": "abm", "BMI": "bmi1", "APX_F": "apx"}
"""As /proc/cpuinfo calls those that have another name there; underscores do not count."""

ARM = {
    "ATOMICS": "atomics",
    "DOTPROD": "asimddp",
    "FP16_VECTOR_ARITHMETIC": "asimdhp",
    "FP16_FML": "asimdfhm",
    "COMPLEX": "fcma",
    "MATMUL_INT8": "i8mm",
    "BF16": "bf16",
    "BF16_VECTOR_ARITHMETIC": "bf16",
    "SHA3": "sha3",
    "MOPS": "mops",
    "SVE": "sve",
    "SVE2": "sve2",
}
"""The same for __ARM_FEATURE_..."""

FEATURES = {f"__{name}__": LINUX_NAMES.get(name, name.lower()) for name in X86.split()}
FEATURES |= {f"__ARM_FEATURE_{name}": flag for name, flag in ARM.items()}


def wanted_target() -> str:
    """The name that kernels are to be compiled for, as -march takes it."""
    return os.environ.get(VARIABLE) or NATIVE


def check_target(target: str, compiler: str) -> None:
    """See that a compiler knows a target, and that this CPU has all that code for it may use.

    Raises:
        InvalidConfig: one of them is not so; the message says which, and what is missing.
    """
    if target == NATIVE:
        return
    missing = missing_features(_features_of(target, compiler))
    if missing:
        raise InvalidConfig(f"{VARIABLE} is {shown(target)}, but this CPU has no {', '.join(missing)}: {WAY_OUT}")


def missing_features(needed: Iterable[str]) -> list[str]:
    """Those that this CPU does not have, or does not tell of, in the names of /proc/cpuinfo."""
    there = {flag.replace("_", "") for flag in cpu_flags()}
    return [flag for flag in needed if flag.replace("_", "") not in there]


def cpu_flags() -> list[str]:
    """What the system says that this CPU has; nothing where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return line[1].split() if line else []


def _features_of(target: str, compiler: str) -> list[str]:
    """What code for a target may use, in the names of /proc/cpuinfo."""
    command = [compiler, f"-march={target}", "-dM", "-E", "-x", "c++", os.devnull]
    try:
        answer = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    except OSError as error:
        raise InvalidConfig(f"{VARIABLE} is {shown(target)}, but {compiler} does not run: {error}") from error
    if answer.returncode:
        reason = next((line for line in answer.stderr.splitlines() if "error" in line), answer.stderr[:200]).strip()
        raise InvalidConfig(f"{VARIABLE} is {shown(target)}, which {compiler} refuses: {reason}; {WAY_OUT}")
    macros = set(re.findall(r"^#define (\w+)", answer.stdout, re.MULTILINE))
    return [flag for macro, flag in FEATURES.items() if macro in macros]
