"""ModelRunner: owns the model and the KV cache, and executes batches."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import xxhash

from nanoengine.attention.backend import choose_backend
from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.engine.messages import SampledBatch, ScheduledBatch
from nanoengine.errors import EngineClosed, InvalidConfig, KVCacheTooSmall
from nanoengine.kernels.interface import choose_kernels
from nanoengine.models.loader import load_weights, weights_fingerprint
from nanoengine.models.registry import build_model
from nanoengine.runner.input_batch import InputBatch
from nanoengine.runner.kv_cache import KVCache, cpu_kv_bytes, gpu_kv_bytes, host_kv_bytes
from nanoengine.runner.kv_mover import KVMover
from nanoengine.runner.sampler import Sampler
from nanoengine.runner.warm_up import largest_batches

logger = logging.getLogger("nanoengine")


class ModelRunner:
    """Loads a model and sizes its KV cache; then `execute` turns each ScheduledBatch into a SampledBatch.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        folder: where its weights are.
        use_tqdm: show a bar while loading.

    Attributes:
        num_blocks: usable blocks of the KV pool.
        num_host_blocks: slots of the host tier.
        max_model_len: the one asked for, or the model's own lowered to what the pool holds.

    Raises:
        InvalidConfig, KVCacheTooSmall: the options cannot work on this machine.
        ModelNotFound, InvalidWeights: the weights are missing or wrong.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path, *, use_tqdm: bool = True):
        self.config = config
        self.device = _device(config.device)
        self.dtype = _dtype(config.dtype, model_config.dtype, self.device)
        self.model_config = model_config
        self.folder = folder
        _check_max_model_len(config.max_model_len, model_config.max_position_embeddings)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.kernels = choose_kernels(config.kernels, self.device, self.dtype)
        attention = config.attention_backend
        if attention == "auto" and self.device.type == "cpu":
            attention = "auto" if self.kernels.name == "native" else "torch"  # what one needs the other needs too
        self.backend = choose_backend(attention, self.device, self.dtype, model_config, config.block_size)
        self.model = build_model(model_config, self.kernels, self.backend, self.dtype, self.device)
        load_weights(self.model.checkpoint_tensors(), folder, use_tqdm=use_tqdm)
        self.sampler = Sampler(self.kernels)
        self.num_blocks, self.max_model_len = self._size_kv_cache()
        self.kv_cache: KVCache | None = self._new_kv_cache(self.num_blocks)
        self.num_host_blocks = self._host_bytes() // self.block_bytes
        self.mover = KVMover(self.kv_cache.layers, self.num_host_blocks)
        logger.info("%s", self.describe())

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SampledBatch:
        """Run one step: write the K/V of its tokens, and sample a token for each row that asks for one."""
        if self.kv_cache is None:
            raise EngineClosed("the model runner is closed")
        unwritten = self.mover.run(batch.transfers)
        sampled = self._run(batch, self.kv_cache) if batch else SampledBatch([])
        sampled.unwritten = unwritten
        return sampled

    def _run(self, batch: ScheduledBatch, kv_cache: KVCache) -> SampledBatch:
        inputs = InputBatch.build(batch, kv_cache.layers, self.config.block_size, self.device)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        if not batch.sampling:
            return SampledBatch([])
        logits = self.model.compute_logits(hidden[inputs.sampled_rows])
        positions = [inputs.metadata.seq_lens_list[row] for row in batch.sampled_rows]
        return self.sampler.sample(logits, batch.sampling, positions)

    def close(self) -> None:
        """Give the memory of the model and the cache back."""
        self.kv_cache = None
        del self.model, self.mover
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def kv_fingerprint(self) -> str:
        """Of all that K/V depends on but tokens: the weights, their use, and the layout of a block."""
        parts = (
            weights_fingerprint(self.folder),
            self.dtype,
            self.backend.name,
            self.config.block_size,
            self.model_config,
        )
        return xxhash.xxh3_128_hexdigest(repr(parts).encode())

    def describe(self) -> str:
        """The start-up line: what runs where, by which path, and how much KV there is."""
        place = f"cpu, {torch.get_num_threads()} threads" if self.device.type == "cpu" else _gpu_name(self.device)
        kv_bytes = self.num_blocks * self.block_bytes
        config, model = self.config, self.model_config
        limit = model.max_position_embeddings
        max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)  # each computes a token in a step
        is_lowered = config.max_model_len is None and self.max_model_len < limit
        lowered = f" (lowered from {limit} to what the KV pool holds)" if is_lowered else ""
        return (
            f"{config.model}: {model.architecture}, {model.num_parameters() / 1e6:.1f} M parameters, "
            f"{str(self.dtype).removeprefix('torch.')} on {place}; "
            f"kernels: {self.kernels.name} ({self.kernels.description}); "
            f"attention: {self.backend.name} ({self.backend.description}), no CUDA graphs; "
            f"KV pool: {kv_bytes / 2**20:.0f} MiB = {self.num_blocks} blocks x {config.block_size} tokens ({self._kv_source}); "
            f"{self._describe_tiers()}"
            f"max_model_len {self.max_model_len}{lowered}; "
            f"at most {max_num_seqs} sequences and {config.max_num_batched_tokens} tokens a step"
        )

    def _describe_tiers(self) -> str:
        host = f"{self.num_host_blocks} blocks in host memory; " if self.num_host_blocks else ""
        disk = f"KV on disk: {self.config.kv_disk_path}; " if self.config.kv_disk_path else ""
        return host + disk

    # ---- sizing

    @property
    def block_bytes(self) -> int:
        return self.model_config.kv_bytes_per_token(self.dtype.itemsize) * self.config.block_size

    def _new_kv_cache(self, num_blocks: int) -> KVCache:
        try:
            return KVCache(num_blocks, self.model_config, self.backend, self.dtype, self.device)
        except (
            RuntimeError,
            OSError,
        ) as error:  # torch's allocators raise the first or a subclass of it, mmap the second
            raise InvalidConfig(
                f"the KV pool ({self._kv_source}) of {num_blocks} blocks takes {num_blocks * self.block_bytes} bytes, which "
                "this device does not have: lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
            ) from error

    def _size_kv_cache(self) -> tuple[int, int]:
        """Usable blocks of the pool, and the longest sequence."""
        config = self.config
        wanted_len = config.max_model_len or self.model_config.max_position_embeddings
        blocks_per_sequence = -(-wanted_len // config.block_size)
        if config.num_kv_blocks is not None:
            num_blocks, self._kv_source = config.num_kv_blocks, "num_kv_blocks"
        elif config.kv_cache_memory is not None:
            num_blocks, self._kv_source = self._blocks_in(config.kv_cache_memory), "kv_cache_memory"
        else:
            if self.device.type == "cpu":
                num_blocks, self._kv_source = (
                    self._blocks_in(cpu_kv_bytes()),
                    "half of the available RAM, at most 4 GiB",
                )
            else:
                self._kv_source = f"gpu_memory_utilization {config.gpu_memory_utilization}"
                num_blocks = self._blocks_in(self._measure_gpu_kv_bytes())
            most = blocks_per_sequence * config.max_num_seqs
            if num_blocks > most:  # more could never be in use at once
                num_blocks, self._kv_source = most, "max_num_seqs x max_model_len"
        needed = blocks_per_sequence if config.max_model_len is not None else 1
        if num_blocks < needed or num_blocks * config.block_size < 2:
            raise KVCacheTooSmall(
                f"the KV pool ({self._kv_source}) has {num_blocks} blocks of {config.block_size} tokens "
                f"({self.block_bytes} bytes each), but one sequence of max_model_len {wanted_len} needs {blocks_per_sequence}: "
                "lower max_model_len, or raise num_kv_blocks, kv_cache_memory or (on a GPU) gpu_memory_utilization"
            )
        return num_blocks, min(wanted_len, num_blocks * config.block_size)

    def _host_bytes(self) -> int:
        if self.config.kv_host_memory is not None:
            return self.config.kv_host_memory
        return 0 if self.config.preemption_mode == "recompute" else host_kv_bytes()

    def _blocks_in(self, num_bytes: int) -> int:
        """Usable blocks in so many bytes: one more is the null block."""
        return max(num_bytes // self.block_bytes - 1, 0)

    def _measure_gpu_kv_bytes(self) -> int:
        """Memory that steps of full size leave for the KV pool, by running them."""
        config, device = self.config, self.device
        max_len = config.max_model_len or self.model_config.max_position_embeddings
        batches = largest_batches(config.max_num_seqs, config.max_num_batched_tokens, max_len, config.block_size)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        cache = self._new_kv_cache(max(map(max, batches[0].block_tables)))
        cache.fill(0.0)
        current = torch.cuda.memory_allocated(device)
        try:
            with torch.inference_mode():
                for batch in batches:
                    self._run(batch, cache)
        except torch.OutOfMemoryError as error:
            raise KVCacheTooSmall(
                f"a step of max_num_batched_tokens {config.max_num_batched_tokens} or max_num_seqs {config.max_num_seqs} "
                "does not fit in the memory that the weights leave, before any KV pool: lower them, or free memory on the device"
            ) from error
        peak = torch.cuda.max_memory_allocated(device)
        del cache
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return gpu_kv_bytes(total, free, config.gpu_memory_utilization, peak, current)


def _check_max_model_len(asked: int | None, limit: int) -> None:
    if asked is not None and asked > limit:
        raise InvalidConfig(f"max_model_len is {asked}, but the model was made for at most {limit} positions: lower it")
    if asked is not None and asked < 2:
        raise InvalidConfig(f"max_model_len is {asked}: it must hold a prompt token and a new one, so at least 2")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InvalidConfig(
                f"device is {name!r}, but torch sees {count} CUDA devices: use device='cpu', or install a CUDA torch"
            )
        device = torch.device("cuda", device.index or 0)
    return device


def _dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's where the device is fast at it, float32 elsewhere."""
    if asked != "auto":
        return getattr(torch, asked)
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


def _gpu_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})"
