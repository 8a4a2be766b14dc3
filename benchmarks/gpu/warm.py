"""Compile every launch of the Triton kernels for the GPU that is there, in many processes, into Triton's cache.

    python -m benchmarks.gpu.warm --processes 14

Each is compiled as most launches find it: addresses and integers are multiples of 16. What is launched in other ways is compiled
when it is. `--capability 90` compiles for such a GPU though none is there.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from time import perf_counter

import nanoengine.kernels.triton as kernels
from benchmarks.options import positive_int

WITHOUT_LAUNCHES = {"launch", "paged_cache", "tuning"}


def compile_launch(module: str, index: int, capability: int) -> str:
    """Compile launch `index` of a module; returns what went wrong, or nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch = importlib.import_module(module).launches()[index]
    if launch.least_capability > capability:
        return ""
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (parameter, kind) in enumerate(zip(launch.kernel.params, launch.signature.values(), strict=True))
        if kind.startswith(("*", "i")) and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    }
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    try:
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception:  # whatever a compiler raises; the others are still worth compiling
        return f"{launch.name}: {traceback.format_exc(limit=-3)}"
    return ""


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    start = perf_counter()
    names = args.modules or sorted(
        {module.name for module in pkgutil.iter_modules(kernels.__path__)} - WITHOUT_LAUNCHES
    )
    modules = [f"{kernels.__name__}.{name}" for name in names]
    jobs = [(module, i) for module in modules for i in range(len(importlib.import_module(module).launches()))]
    capability = args.capability or _capability()
    if args.processes == 1:
        errors = [compile_launch(*job, capability) for job in jobs]
    else:
        spawn = multiprocessing.get_context("spawn")  # a forked compiler may wait for a thread that was not forked
        with ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
            futures = [pool.submit(compile_launch, *job, capability) for job in jobs]
            errors = [done.result() for done in as_completed(futures)]
    errors = [error for error in errors if error]
    for error in errors:
        print(f"ERROR {error}")
    print(
        f"{len(jobs) - len(errors)} of {len(jobs)} launches compile for sm_{capability}: {perf_counter() - start:.1f} s"
    )
    return int(bool(errors))


def _capability() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_warm", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--processes", type=positive_int, default=1, help="that compile side by side (default: 1)")
    parser.add_argument("--capability", type=positive_int, help="ten times the compute capability to compile for")
    parser.add_argument("--modules", nargs="+", metavar="MODULE", help="of nanoengine.kernels.triton (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
