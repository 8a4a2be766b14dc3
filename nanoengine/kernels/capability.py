"""Kernels made for a device, and attention over them, as a capability of the engine."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

import torch

from nanoengine.attention.backend import AttentionBackend, choose_backend
from nanoengine.attention.kv_cache import BlockMajorKVCache, HugePageKVCache
from nanoengine.core.attention import CoreAttentionBackend
from nanoengine.core.capability import Capability
from nanoengine.core.errors import InvalidConfig
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.kv_cache import KVCache
from nanoengine.core.startup import Startup
from nanoengine.kernels.interface import Kernels, choose_kernels
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kernels.options import KernelOptions
from nanoengine.models.decoder import attention_specs
from nanoengine.models.placement import choose_dtype

logger = logging.getLogger("nanoengine")


class NativeAndTriton(Capability):
    options = KernelOptions

    def dtype(self, startup: Startup) -> torch.dtype:
        asked, checkpoint, device = startup.config.dtype, startup.model_config.dtype, startup.device.torch_device
        is_open = asked == "auto" and startup.config.of(KernelOptions).kernels in ("auto", "native")
        # On a CPU these kernels multiply 16 bits faster than 32, also where torch does not; of these they know bfloat16.
        if is_open and checkpoint != "float32" and self._are_native(startup):
            return torch.bfloat16
        return choose_dtype(asked, checkpoint, device)

    def _are_native(self, startup: Startup) -> bool:
        return unsupported_reason(startup.device.torch_device, torch.bfloat16, use_tqdm=startup.use_tqdm) is None

    def kernels(self, startup: Startup) -> CoreKernels:
        own, device = startup.config.of(KernelOptions), startup.device.torch_device
        asked = own.activation_dtype
        if asked == "auto" and startup.config.dtype == "float32":
            asked = "float32"
        found = choose_kernels(
            own.kernels,
            device,
            startup.dtype,
            activation_dtype=asked,
            num_threads=startup.device.num_threads,
            use_tqdm=startup.use_tqdm,
        )
        if found.name != "native" and own.activation_dtype not in ("auto", "float32"):
            raise InvalidConfig(
                f"activation_dtype is {asked!r}, but the {found.name} kernels round none ({found.description}): use "
                "activation_dtype='auto', or a device and dtype that the native kernels compute on"
            )
        if own.kernels == "auto" and found.name == "torch":
            logger.warning("plain torch computes, which is slower: %s", found.description)
        return found

    def backend(self, startup: Startup) -> CoreAttentionBackend:
        own, name = startup.config.of(KernelOptions), startup.config.attention_backend
        if own.kv_cache_dtype == "int8":
            startup.kv_dtype = torch.int8
        is_plain = startup.kernels.name == "torch" and (own.kernels == "torch" or not startup.device.is_cuda)
        if name == "auto" and is_plain:
            name = "torch"  # what others need, the kernels that were made for the device need too, but for flash-attn
        where = startup.device.torch_device, startup.dtype, startup.model_config, startup.config.block_size
        specs = attention_specs(startup.model_config)
        is_int8 = startup.kv_dtype is torch.int8
        found, passed_over = choose_backend(name, *where, specs, quantized=is_int8)
        if passed_over:
            startup.passed_over = f" (not {passed_over})"
        if is_int8:
            found.kv_shape = partial(found.kv_shape, quantized=True)  # type: ignore[method-assign]
        return found

    def kv_cache(self, startup: Startup, num_blocks: int) -> KVCache:
        backend = startup.backend
        kind = BlockMajorKVCache if isinstance(backend, AttentionBackend) and backend.block_major else HugePageKVCache
        where = startup.kv_dtype or startup.dtype, startup.device.torch_device
        return kind(num_blocks, startup.groups, startup.block_shape, *where)

    def describe_itself(self, startup: Startup) -> str:
        formats: Counter[str] = Counter()
        for matrix in startup.matrices:
            formats.update(matrix.formats())
        listed = " + ".join(f"{size / 2**20:.1f} MiB in {name}" for name, size in formats.most_common())
        plain = str(startup.dtype).removeprefix("torch.")
        kernels, products = startup.kernels, ""
        if isinstance(kernels, Kernels) and formats.keys() - {plain}:
            products = f" ({kernels.quantized_products})"
        return f"weights: {listed or 'in other processes'}{products}"
