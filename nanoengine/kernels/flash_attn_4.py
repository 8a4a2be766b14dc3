"""Attention of long prompts by flash-attn 4 (`flash_attn.cute`), on Hopper and Blackwell, beside Triton's kernels.

It reads K/V in the pages of Triton's cache. It compiles a kernel for each kind of layer, in seconds: another process does that,
for the next start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.caches import cache_folder
from nanoengine.core.attention import AttentionSpec, KVLayer, Runs
from nanoengine.core.model_config import DenseConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGES = "flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi"
"""Those whose versions decide whether a compiled kernel is valid."""
LEAST_TOKENS, MOST_RUNS = 256, 256
"""Steps whose longest run is shorter, or that have more runs, would need kernels of another kind."""


@dataclass(frozen=True)
class Kernel:
    """What it compiles a kernel for, whatever the lengths are."""

    head_dim: int
    group: int  # query heads that share K and V
    dtype: str
    sinks: bool = False
    soft_cap: float | None = None


def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason that it cannot compute here; None if it can. Takes no time: it imports nothing."""
    try:
        version(PACKAGES[0])
    except PackageNotFoundError:
        return "the package is not installed: pip install 'nanoengine[flash-attn-4]'"
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if major not in (9, 10):
        return f"it takes compute capability 9 or 10, and this device ({device.type}) has {major}"
    if dtype not in DTYPES.values():
        return f"it computes in float16 or bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 256 or (major == 10 and 128 < head_dim < 256):
        return f"head_dim {head_dim} is no multiple of 8 up to 128, and is not 256"
    return None


def kernels_of(model: DenseConfig, dtype: torch.dtype, specs: Sequence[AttentionSpec] = ()) -> list[Kernel]:
    """One for each kind of layer that it computes. In the tiles of a window it would read blocks that are forgotten, so it
    computes layers without one. All must have the heads that the model says.
    """
    group, name = model.num_heads // model.num_kv_heads, str(dtype).removeprefix("torch.")
    needed = {
        Kernel(model.head_dim, group, name, spec.sinks, spec.soft_cap)
        for spec in specs or [AttentionSpec(1.0)]
        if spec.window is None
    }
    return sorted(needed, key=repr)


def prepare(kernels: Sequence[Kernel], device: torch.device) -> str | None:
    """Make it ready for these layers, in at most a few seconds: another process compiles kernels that are not compiled yet.

    Returns:
        The reason that it does not compute in this process; None if it does.
    """
    if not kernels:
        return "all layers have windows"
    reasons = (unsupported_reason(device, DTYPES.get(one.dtype, torch.float32), one.head_dim) for one in kernels)
    if reason := next(filter(None, reasons), None):
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if missing := [kernel for kernel in kernels if not _mark(kernel, major).exists()]:
        target = {"capability": [major, minor], "multiprocessors": count, "kernels": [asdict(one) for one in missing]}
        subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it goes on when this process ends
        )
        return f"{len(missing)} of its kernels are being compiled, for the next start"
    functions()
    return None


def functions() -> Any:
    """The module that has its functions; kernels are stored in the cache folder. It takes a second or two."""
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(_folder())
    import flash_attn.cute

    return flash_attn.cute


def attend(q: Tensor, kv: KVLayer, runs: Runs, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attention of the last tokens of each sequence. The host need not know lengths, but for bounds.

    Args:
        q: [num_tokens, num_heads, head_dim], float16 or bfloat16.
        kv: each [num_blocks, block_size, num_kv_heads, head_dim], with any strides.
        spec: without a window.
        sinks: [num_heads] float32.

    Returns:
        As q, in one piece. Rows of a sequence without tokens may hold anything.
    """
    attended = functions().flash_attn_varlen_func(
        q,
        *kv,
        cu_seqlens_q=runs.query_start_loc,
        seqused_k=runs.seq_lens,
        page_table=runs.block_tables,
        max_seqlen_q=runs.longest,
        max_seqlen_k=max(runs.seq_lens_list),
        softmax_scale=spec.scale,
        causal=True,
        learnable_sink=sinks,
        softcap=spec.soft_cap or 0.0,
    )
    return attended[0] if isinstance(attended, tuple) else attended


def compile_ahead(kernels: Sequence[Kernel], capability: tuple[int, int], multiprocessors: int) -> None:
    """Compile kernels for such a GPU; none is needed. Those that are in the cache are loaded, as a check."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    major, minor = capability
    os.environ["FLASH_ATTENTION_ARCH"], os.environ["CUTE_DSL_ARCH"] = f"sm_{major}{minor}", f"sm_{major}{minor}a"
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(multiprocessors)
    functions()
    for one in kernels:
        with FakeTensorMode(), torch.inference_mode():  # tensors without memory, on a device that need not be there
            device, dtype = torch.device("cuda"), DTYPES[one.dtype]
            q = torch.empty(LEAST_TOKENS, one.group, one.head_dim, dtype=dtype, device=device)
            cache = torch.empty(32, 1, 16, one.head_dim, dtype=dtype, device=device).transpose(1, 2)
            starts, lens, tables = (torch.empty(shape, dtype=torch.int32, device=device) for shape in (2, 1, (1, 32)))
            runs = Runs(starts, lens, tables, [LEAST_TOKENS], [2 * LEAST_TOKENS])
            sinks = torch.empty(one.group, dtype=torch.float32, device=device) if one.sinks else None
            attend(q, (cache, cache.clone()), runs, AttentionSpec(1.0, sinks=one.sinks, soft_cap=one.soft_cap), sinks)
        mark = _mark(one, major)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _folder() -> Path:
    return cache_folder("flash-attn-4")


def _mark(kernel: Kernel, major: int) -> Path:
    """A file that says that the kernel is in the cache, for these versions of what compiled it."""
    versions = "-".join(version(package) for package in PACKAGES)
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return _folder() / "compiled" / f"{versions}-{python}-sm{major}" / "-".join(map(str, asdict(kernel).values()))


def main(argument: str) -> None:
    target = json.loads(argument)
    kernels = [Kernel(**one) for one in target["kernels"]]
    compile_ahead(kernels, tuple(target["capability"]), target["multiprocessors"])


if __name__ == "__main__":
    main(sys.argv[1])
