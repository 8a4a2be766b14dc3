"""What kernels with specialized warps are compiled to for compute capability 9.0: a line of JSON for each. No GPU is needed.

`python -m tests.kernels.specialized_code`, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import warnings

import pytest

from nanoengine.kernels.triton.attention import whole_prompt
from nanoengine.kernels.triton.products import gated_product
from tests.kernels.gpu_code import instructions, some
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
    full_names, ptx = instructions(launch)
    names = [name.split(".")[0] for name in full_names]
    kinds = ("USETMAXREG", "UTMALDG", "HGMMA", "STL", "LDL")
    threads = int(ptx.partition(".reqntid ")[2].split(",")[0].split("\n")[0])
    return {"kernel": launch.name, "threads": threads} | {kind: names.count(kind) for kind in kinds}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of what a coming Triton will do
    with noting() as launches, pytest.MonkeyPatch.context() as patch:
        for module in (whole_prompt, gated_product):
            patch.setattr(module, "specializes_warps", lambda _: True)
        launch_some()
    for launch in launches:
        print(json.dumps(read(launch)))
