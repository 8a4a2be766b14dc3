"""What kernels with specialized warps are compiled to for compute capability 9.0: a line of JSON for each. No GPU is needed.

`python -m tests.kernels.specialized_code`, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import warnings

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoengine.kernels.triton.attention import whole_prompt
from nanoengine.kernels.triton.products import gated_product
from tests.kernels.gpu_code import INSTRUCTION, disassembler, some
from tests.kernels.noting import Launch, noting


def launch_some() -> None:
    qkv = some(300, 32, 128)
    for tile in (64, 128):
        q, k, v = qkv.split((16, 8, 8), dim=1)
        whole_prompt.whole_prompt(q, k, v, 0.1, tile)
    for rows in (1000, 3000):
        gated_product.gated_product(some(rows, 1024), some(6144, 1024), "silu")


def read(launch: Launch) -> dict[str, object]:
    """The kernel, its threads, how often they change their registers, copies by descriptors, products, and spills."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(disassembler()), "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [found[1].split(".")[0] for found in INSTRUCTION.finditer(listing)]
    kinds = ("USETMAXREG", "UTMALDG", "HGMMA", "STL", "LDL")
    threads = int(compiled.asm["ptx"].partition(".reqntid ")[2].split(",")[0].split("\n")[0])
    return {"kernel": launch.name, "threads": threads} | {kind: names.count(kind) for kind in kinds}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of what a coming Triton will do
    with noting() as launches, pytest.MonkeyPatch.context() as patch:
        for module in (whole_prompt, gated_product):
            patch.setattr(module, "specializes_warps", lambda _: True)
        launch_some()
    for launch in launches:
        print(json.dumps(read(launch)))
