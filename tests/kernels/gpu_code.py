"""What the machine code of some kernels for compute capability 9.0 does before it waits for the kernel before: a line of JSON for
each launch. No GPU is needed.

`python -m tests.kernels.gpu_code`, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoengine.kernels.operations import Norm
from nanoengine.kernels.triton.attention.paged_cache import PagedCache
from nanoengine.kernels.triton.products.fusion import Fusion
from nanoengine.kernels.triton.products.gemv import gemv
from nanoengine.kernels.triton.products.heads import heads_of_product
from nanoengine.kernels.triton.products.mlp import AHEAD, HELD, fitting_sizes, mlp_of_one_row
from nanoengine.kernels.triton.products.norm import add_rms_norm
from nanoengine.kernels.triton.products.packed import PackedWeight
from nanoengine.kernels.triton.products.packed_gemv import packed_gemv
from nanoengine.kernels.triton.products.swap_ab import swap_ab
from nanoengine.kernels.triton.tuning import DEFAULTS
from nanoengine.kernels.triton.workspace import Workspace
from tests.kernels.launches import attend
from tests.kernels.noting import Launch, noting

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", re.MULTILINE)
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""What a thread loads, by the suffix of a load; without one 4."""


@dataclass
class Code:
    """What is in the code of a launch. Bytes are those that a program loads from global memory: every load stands for one of each
    thread, so loops count once.

    Attributes:
        values: sizes that the kernel was compiled for.
        before, behind: bytes loaded before and behind the wait.
        prefetches: instructions before the wait that ask for memory to come into the L2 cache.
        stores: to global memory, before the wait.
        trigger: whether the next kernel may start before the wait.
        spills: loads and stores of registers that found no place.
        conversions: of integers to floats.
        matrix_loads: reads of matrices from shared memory to where tensor cores want numbers.
    """

    kernel: str
    values: dict[str, int]
    waits: int
    before: int
    behind: int
    prefetches: int
    stores: int
    trigger: bool
    spills: int
    conversions: int
    matrix_loads: int


def disassembler() -> str | None:
    """The one that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(tool) if tool.is_file() else None


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_some() -> None:
    """The products of a layer of 1,024 dimensions, one of very many inputs, one that swaps factors, a norm, and decode attention
    over K and V of 8 bits.
    """
    norm = Norm(some(1024, dtype=torch.float32), 1e-6)
    one, two = some(1, 1024), some(2, 1024)
    fusion = Fusion(norm=norm, residual=one, launch=2)
    gemv(one, some(4096, 1024), fusion)
    gemv(two, some(6144, 1024), Fusion(norm=norm, residual=two, activation="silu", launch=1))
    gemv(some(1, 3072), some(1024, 3072), Fusion(launch=2))
    gemv(some(1, 9728), some(2560, 9728), Fusion(launch=1))
    for bits, outputs, launch in ((8, 6144, 2), (4, 6144, 1)):
        numbers, scales = some(outputs, 2560 * bits // 8, dtype=torch.uint8), some(outputs, 1, dtype=torch.float32)
        weight, large = PackedWeight(numbers, scales, None, bits), some(1, 2560)
        wide = Norm(some(2560, dtype=torch.float32), 1e-6)
        packed_gemv(large, weight, Fusion(norm=wide, residual=large, launch=launch))
    ahead = some(1024, 2048), some(6144, 1024)
    k, v = (some(9, 16, 8, 128) for _ in range(2))
    angles = some(1, 1, 64, dtype=torch.float32)
    of_head = some(128, dtype=torch.float32)
    changes, slots = (of_head, of_head, 1e-6, angles, angles), some(1, dtype=torch.int64)
    heads_of_product(one, some(4096, 1024), fusion, Workspace(), changes, PagedCache(k, v), slots, ahead)
    for how in (HELD, AHEAD):
        sizes = fitting_sizes(1024, 3072, 2, one.device, how)
        assert sizes is not None
        gated = fusion._replace(activation="silu")
        mlp_of_one_row(one, some(6144, 1024), some(1024, 3072), gated, Workspace(), sizes, how)
    swap_ab(some(16, 2048), some(1024, 2048), Fusion(launch=2), Workspace())
    add_rms_norm(two, two, *norm, launch=1)
    for tile, count in ((0, 2), (32, 4), (64, 3)):
        tuning = replace(DEFAULTS, int8_pair_tile=tile, int8_programs_per_sm=count, dependent_launch=1)
        attend(torch.bfloat16, 128, tuning=tuning, int8=True)


def instructions(launch: Launch) -> tuple[list[str], str]:
    """Names of the instructions of the machine code, with suffixes; and the code in PTX."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    tool = disassembler()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listing = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return [found[1] for found in INSTRUCTION.finditer(listing)], compiled.asm["ptx"]


def read(launch: Launch) -> Code:
    names, _ = instructions(launch)
    waits = [i for i, name in enumerate(names) if name.startswith("ACQBULK")]
    wait = waits[0] if waits else 0
    threads = 32 * launch.options.get("num_warps", 4)

    def loaded(part: list[str]) -> int:
        loads = [name.split(".")[1:] for name in part if re.match(r"LDG(STS)?\b", name)]
        return threads * sum(next((BYTES[each] for each in suffixes if each in BYTES), 4) for suffixes in loads)

    def count(part: list[str], *kinds: str) -> int:
        return sum(name.split(".")[0] in kinds for name in part)

    return Code(
        launch.name,
        {name: value for name, value in launch.values.items() if name.isupper() and isinstance(value, int)},
        len(waits),
        loaded(names[:wait]),
        loaded(names[wait:]),
        count(names[:wait], "UBLKPF"),
        count(names[:wait], "STG", "ATOMG", "RED"),
        count(names[:wait], "PREEXIT") > 0,
        count(names, "LDL", "STL"),
        count(names, "I2F", "I2FP"),
        count(names, "LDSM"),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of what a coming Triton will do
    if disassembler() is None:
        sys.exit("this Triton comes without cuobjdump")
    with noting() as launches:
        launch_some()
    for launch in launches:
        if "LAUNCH" in launch.values and not launch.values["LAUNCH"]:
            continue  # it waits for nothing
        print(json.dumps(asdict(read(launch))))
