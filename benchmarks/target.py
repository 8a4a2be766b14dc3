"""`--cpu NAME`: measuring as on another CPU than the one at hand.

Native kernels are compiled for it, and for a level of x86-64 torch's libraries are held to the same instructions. Libraries
read that once, when they are loaded: it must be said before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.options import BadOption
from nanoengine.kernels.native.target import VARIABLE

LIBRARIES = {
    "x86-64-v3": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "x86-64-v4": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
"""What holds torch, oneDNN and MKL to a level of x86-64."""


def add_cpu_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu",
        metavar="NAME",
        help="measure as on this CPU, with kernels and torch alike: x86-64-v3 (AVX2) or x86-64-v4 (AVX-512) "
        f"(default: ${VARIABLE}, or native)",
    )


def hold_to_cpu(arguments: list[str]) -> None:
    """Set this process, and those that it starts, to the CPU that the arguments name, if they name one.

    Raises:
        BadOption: torch is there already.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cpu")
    name = parser.parse_known_args(arguments)[0].cpu
    if name is None:
        return
    if "torch" in sys.modules:
        raise BadOption(f"--cpu {name} comes too late, torch is imported already: run bench.py as a process of its own")
    os.environ.update({VARIABLE: name, **LIBRARIES.get(name, {})})
