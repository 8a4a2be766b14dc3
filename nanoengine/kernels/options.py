"""Options of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.options import option
from nanoengine.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions(Options):
    """Options of the kernels.

    Args:
        kernels: "native" (compiled for this CPU), "triton" (for NVIDIA GPUs), "torch" (plain torch operations, attention too
            unless it is named), or "auto": those made for the device where they can run.
        activation_dtype: the precision of activations in products with quantized weights: "int8" (by blocks of 16, so that
            products are sums of integers), "int16" (the same in two parts of 8 bits), "bfloat16" (so are the weights, as
            they are read: the products of a model in bfloat16), "float32" (nothing is rounded: the exact results of the
            stored weights), or "auto": float32 where `dtype` asks for it by name; else, with the native kernels, bfloat16 on
            a CPU with AMX and int8 on others. All are possible on every CPU; where the native kernels do not run, float32
            and auto alone.
        kv_cache_dtype: "auto" (that of the model), or "int8": 8-bit numbers and a scale for each token of a head, which is
            about half the bytes of bfloat16, and near it.
    """

    kernels: str = option("auto", choices=("auto", "native", "triton", "torch"))
    activation_dtype: str = option("auto", choices=("auto", "int8", "int16", "bfloat16", "float32"))
    kv_cache_dtype: str = option("auto", choices=("auto", "int8"))
