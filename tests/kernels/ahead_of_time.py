"""Compile every launch of the Triton kernels for several GPUs, none of which need be there: a line of JSON for each.

`python -m tests.kernels.ahead_of_time [--some]`, without TRITON_INTERPRET. Exits with 1 if anything does not fit.
`--some` compiles one launch of each kernel, of neighbours for different GPUs. It knows what a chip has, not what is in a kernel.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from itertools import starmap

from tests.kernels.launches import launch_all
from tests.kernels.noting import Launch, noting

PROCESSES = 2

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a block may have, by compute capability times ten (CUDA C++ Programming Guide)."""

VARIANTS = [(80, False), *((architecture, True) for architecture in SHARED_MEMORY)]
"""What each launch is compiled for. Wide copies need alignment: it takes more shared memory, and saves registers."""

REGISTERS = 255
"""Registers that a thread may have."""

ERROR_LENGTH = 3000
"""Characters of an error that are kept: the last ones say most."""

TENSOR_MEMORY = 512
"""Columns of tensor memory on the chips that have it."""


@dataclass
class Compiled:
    """What one launch takes of one chip, or the error that compiling it ended in."""

    kernel: str
    launch: str  # what it was noted for
    architecture: int
    aligned: bool  # addresses and integers that were multiples of 16 are known to be
    seconds: float = 0.0
    registers: int = 0
    spilled: int = 0  # bytes, stored and loaded
    shared: int = 0  # bytes
    tensor_memory: int = 0  # columns
    error: str = ""

    def faults(self) -> list[str]:
        """Why this launch cannot run, or runs badly; empty if all is well."""
        if self.error:
            return [self.error]
        found = []
        if self.spilled:
            found.append(f"{self.spilled} bytes of registers are spilled")
        limits = (
            ("registers", self.registers, REGISTERS),
            ("bytes of shared memory", self.shared, SHARED_MEMORY[self.architecture]),
            ("columns of tensor memory", self.tensor_memory, TENSOR_MEMORY),
        )
        found += [f"{used} {what}, and the chip has {limit}" for what, used, limit in limits if used > limit]
        return found


@cache
def all_launches() -> list[Launch]:
    """Each once."""
    with noting() as launches:
        launch_all()
    return list({launch.key(): launch for launch in launches}.values())


def compile_launch(index: int, architecture: int, aligned: bool) -> Compiled:
    """Compile launch `index`; any error becomes part of the result."""
    start = time.perf_counter()
    launch = all_launches()[index]
    result = Compiled(launch.name, launch.key(), architecture, aligned)
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            _compile(launch, result)
        _read(log.getvalue(), result)
    except Exception:  # whatever a compiler raises is what is asked for
        result.error = traceback.format_exc(limit=-3)[-ERROR_LENGTH:]
    result.seconds = round(time.perf_counter() - start, 2)
    return result


def _compile(launch: Launch, result: Compiled) -> None:
    """Compile down to machine code, and print what the assembler says of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # nothing is said of what comes from Triton's cache
    attributes = launch.attributes if result.aligned else {}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", result.architecture, 32), options=launch.options)
    result.shared = compiled.metadata.shared
    result.tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0


def _read(log: str, result: Compiled) -> None:
    """Take from the assembler's words how many registers there are, and how many bytes were spilled."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    if not registers or not spilled:
        raise ValueError(f"the assembler says nothing of registers and spills: {log!r}")
    result.registers, result.spilled = max(registers), sum(spilled)


def jobs(*, some: bool) -> list[tuple[int, int, bool]]:
    """Arguments of `compile_launch`: every launch for every GPU that it is for, or some of each kernel."""
    of_kernel: dict[str, list[tuple[int, int]]] = {}
    for index, launch in enumerate(all_launches()):
        of_kernel.setdefault(launch.name, []).append((index, launch.least_capability))
    found = []
    for number, launches in enumerate(of_kernel.values()):
        variants = [variant for variant in VARIANTS if any(variant[0] >= least for _, least in launches)]
        if some:
            variants = [variants[number % len(variants)]]
        for variant in variants:
            able = [index for index, least in launches if variant[0] >= least]
            chosen = [able[len(able) // 2]] if some else able
            found += [(index, *variant) for index in chosen]
    return found


def main(arguments: Sequence[str]) -> int:
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: nothing is compiled with it")
    faulty, some = False, "--some" in arguments
    for result in starmap(compile_launch, jobs(some=True)) if some else compiled_side_by_side():
        print(json.dumps(asdict(result)), flush=True)
        faulty |= bool(result.faults())
    return int(faulty)


def compiled_side_by_side() -> Iterator[Compiled]:
    spawn = multiprocessing.get_context("spawn")  # a forked compiler may wait for a thread that was not forked with it
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        for done in as_completed([pool.submit(compile_launch, *job) for job in jobs(some=False)]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
