"""Kernels made for a device, and attention over them, as a capability of the engine."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

import torch

from nanoengine.cgroups import within_quota
from nanoengine.core.attention import AttentionSpec, CoreAttentionBackend
from nanoengine.core.capability import Capability
from nanoengine.core.device import Device, open_device
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.kv_cache import KVCache
from nanoengine.core.startup import Startup
from nanoengine.errors import InvalidConfig, shown
from nanoengine.kernels import flash_attn_4
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.flash_attn import FlashAttention
from nanoengine.kernels.kv_cache import BlockMajorKVCache, HugePageKVCache
from nanoengine.kernels.native.attention import NativeAttention
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.native.support import unsupported_reason
from nanoengine.kernels.operations import Kernels
from nanoengine.kernels.options import KernelOptions
from nanoengine.kernels.reference.attention import TorchAttention
from nanoengine.kernels.reference.operations import TorchKernels
from nanoengine.kernels.triton import launch
from nanoengine.kernels.triton.attention.backend import TritonAttention
from nanoengine.kernels.triton.tuning import load_tuning
from nanoengine.ram import available_ram

logger = logging.getLogger("nanoengine")

ON_CUDA: tuple[type[AttentionBackend], ...] = (TritonAttention, FlashAttention, TorchAttention)
ON_CPU: tuple[type[AttentionBackend], ...] = (NativeAttention, TorchAttention)


class NativeAndTriton(Capability):
    options = KernelOptions

    def device(self, startup: Startup) -> Device:
        device = open_device(startup.config.device)
        device.num_threads, device.available_ram = within_quota(device.num_threads), available_ram
        return device

    def dtype(self, startup: Startup) -> torch.dtype:
        requested, checkpoint, device = startup.config.dtype, startup.model_config.dtype, startup.device.torch_device
        kernels = startup.config.of(KernelOptions).kernels
        is_open = requested == "auto" and checkpoint != "float32" and kernels in ("auto", "native")
        # On a CPU these kernels multiply 16 bits faster than 32, also where torch does not; of these they know bfloat16.
        if is_open and unsupported_reason(device, torch.bfloat16, use_tqdm=startup.use_tqdm) is None:
            return torch.bfloat16
        return choose_dtype(requested, checkpoint, device)

    def kernels(self, startup: Startup) -> CoreKernels:
        kernel_options, device = startup.config.of(KernelOptions), startup.device.torch_device
        if startup.gpus_elsewhere:
            return TorchKernels("processes with GPUs compute")
        requested = kernel_options.activation_dtype
        if requested == "auto" and startup.config.dtype == "float32":
            requested = "float32"
        chosen = choose_kernels(
            kernel_options.kernels,
            device,
            startup.dtype,
            activation_dtype=requested,
            num_threads=startup.device.num_threads,
            use_tqdm=startup.use_tqdm,
        )
        if chosen.name != "native" and kernel_options.activation_dtype not in ("auto", "float32"):
            raise InvalidConfig(
                f"activation_dtype is {requested!r}, but the {chosen.name} kernels round none ({chosen.description}): use "
                "activation_dtype='auto', or a device and dtype that the native kernels compute on"
            )
        if kernel_options.kernels == "auto" and chosen.name == "torch":
            logger.warning("plain torch computes, which is slower: %s", chosen.description)
        return chosen

    def backend(self, startup: Startup) -> CoreAttentionBackend:
        kernel_options, name = startup.config.of(KernelOptions), startup.config.attention_backend
        if startup.gpus_elsewhere:  # nothing attends here; blocks are as large as there
            theirs = next((each for each in ON_CUDA if name in ("auto", each.name)), TorchAttention)
            return TorchAttention(startup.config.block_size or theirs.default_block_size)
        if kernel_options.kv_cache_dtype == "int8":
            startup.kv_dtype = torch.int8
        is_plain = startup.kernels.name == "torch" and (kernel_options.kernels == "torch" or not startup.device.is_cuda)
        if name == "auto" and is_plain:
            name = "torch"  # what others need, the kernels that were made for the device need too, but for flash-attn
        is_int8 = startup.kv_dtype is torch.int8
        where = startup.device.torch_device, startup.dtype, startup.config.block_size
        head_dims = startup.head_dims or [startup.model_config.head_dim]
        chosen, unavailable_backends = choose_backend(
            name, *where, head_dims, startup.attention_specs, quantized=is_int8
        )
        if unavailable_backends:
            startup.unavailable_backends = f" (not {unavailable_backends})"
        if isinstance(chosen, TritonAttention) and (least := chosen.tuning.flash_prompt):
            reason = "it has no int8 cache" if is_int8 else _prepare_flash_attn_4(startup)
            chosen.flash_prompt = 0 if reason else least
            addition = f" and flash-attn 4 (prompts from {least} tokens on)"
            startup.unavailable_backends += f" (not flash-attn 4: {reason})" if reason else addition
        return chosen

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


def _prepare_flash_attn_4(startup: Startup) -> str | None:
    """The reason that flash-attn 4 does not compute long prompts; None if it does."""
    model = startup.model_config
    if set(startup.head_dims) - {model.head_dim}:
        return f"layers have heads of several sizes: {sorted(set(startup.head_dims))}"
    kernels = flash_attn_4.kernels_of(model, startup.dtype, startup.attention_specs)
    return flash_attn_4.prepare(kernels, startup.device.torch_device)


def choose_dtype(requested: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's where the device is fast at it, float32 elsewhere."""
    if requested != "auto":
        return getattr(torch, requested)
    if checkpoint == "float32" or _is_fast(checkpoint, device):
        return getattr(torch, checkpoint)
    return torch.float32


def _is_fast(dtype: str, device: torch.device) -> bool:
    """Whether the device computes a half-precision dtype itself, rather than by way of float32."""
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # as in the builds for macOS
        return False
    name = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}[dtype]
    return bool(getattr(torch.ops.mkldnn, name)())


def choose_kernels(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    activation_dtype: str = "auto",
    num_threads: int | None = None,
    use_tqdm: bool = False,
) -> Kernels:
    """The kernels of that name; for "auto" those made for the device if they can run here, and torch's otherwise.

    Args:
        activation_dtype: the precision of activations in products with quantized weights, of native kernels.
        num_threads: of native kernels. None: as many as torch has.
        use_tqdm: show when they have to be compiled first.

    Raises:
        InvalidConfig: the kernels of that name cannot run here; the message says why.
    """
    made_for_it = "triton" if device.type == "cuda" else "native"
    wanted = made_for_it if name == "auto" else name
    reason = None
    if wanted == "native":
        reason = unsupported_reason(device, dtype, use_tqdm=use_tqdm)
    elif wanted == "triton":
        reason = launch.unsupported_reason(device)
    if reason is not None and name != "auto":
        raise InvalidConfig(f"kernels is {name!r}, but they cannot run here: {reason}")
    if wanted == "torch" or reason is not None:
        return TorchKernels(reason and f"no {wanted} ones: {reason}")
    if wanted == "native":
        return NativeKernels(activation_dtype=activation_dtype, num_threads=num_threads)
    from nanoengine.kernels.triton.operations import TritonKernels  # only now: the package triton need not be there

    return TritonKernels(load_tuning(device))


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None,
    head_dims: Sequence[int],
    specs: Sequence[AttentionSpec] = (),
    *,
    quantized: bool = False,
) -> tuple[AttentionBackend, str]:
    """The backend of that name, or for "auto" the first that can run here; and why those before it cannot. On a GPU our own
    kernels come first: they alone have been measured there (benchmarks/gpu.md), and record prompts and drafts, too.

    Args:
        block_size: None: as the backend likes it.
        head_dims: of the layers.
        specs: what the layers of the model ask for; none of them asks for more than a scale if nothing is said.
        quantized: whether the KV cache has int8 values.

    Raises:
        InvalidConfig: no such backend, or it cannot run here, or not for these layers; the message says why.
    """
    backends = {backend.name: backend for backend in (*ON_CUDA, *ON_CPU)}
    if name != "auto" and name not in backends:
        raise InvalidConfig(f"attention_backend is {shown(name)}: it must be one of auto, {', '.join(backends)}")
    reasons: dict[str, str] = {}
    in_order = ON_CUDA if device.type == "cuda" else ON_CPU
    for backend in in_order if name == "auto" else (backends[name],):
        size = block_size or backend.default_block_size
        of_sizes = (backend.unsupported_reason(device, dtype, head_dim, size) for head_dim in head_dims)
        reason = next(filter(None, of_sizes), None) or _missing_feature(backend, specs)
        if reason is None and quantized and not backend.quantizes:
            reason = "it has no int8 cache, and kv_cache_dtype is 'int8': choose 'auto'"
        if reason is None:
            chosen = backend(size)
            if isinstance(chosen, TritonAttention):
                chosen.tuning = load_tuning(device)
            chosen.quantized = quantized
            return chosen, _list(reasons)
        reasons[backend.name] = reason
    raise InvalidConfig(f"no attention backend can run: {_list(reasons)}")


def _missing_feature(backend: type[AttentionBackend], specs: Sequence[AttentionSpec]) -> str | None:
    """What a layer asks for and a backend does not compute."""
    for spec in specs:
        for field in fields(spec):
            value = getattr(spec, field.name)
            if field.name not in ("scale", *backend.features) and value != field.default:
                return f"it has no {field.name}, and a layer of the model asks for {field.name}={value}"
    return None


def _list(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
