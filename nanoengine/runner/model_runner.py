"""ModelRunner: owns the model and the KV cache, and executes batches in the order in which they are launched."""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from nanoengine.attention.backend import choose_backend
from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.engine.messages import Phase, SampledBatch, ScheduledBatch
from nanoengine.errors import EngineClosed, InvalidConfig, KVCacheTooSmall
from nanoengine.kernels.interface import choose_kernels
from nanoengine.models.loader import load_weights, weights_fingerprint
from nanoengine.models.qwen3 import Qwen3ForCausalLM
from nanoengine.models.registry import build_model
from nanoengine.runner.graphs import DecodeGraphs, bucket_for, bucket_sizes
from nanoengine.runner.inputs import Layout, Shape, pack, shape_of, unpack
from nanoengine.runner.kv_cache import KVCache, gpu_kv_bytes, host_kv_bytes
from nanoengine.runner.kv_mover import KVMover
from nanoengine.runner.kv_sizing import size_pool
from nanoengine.runner.placement import choose_dtype, device_name, find_device
from nanoengine.runner.rows import Changes, Rows
from nanoengine.runner.sampler import Logprobs, Sampler, is_plain, read_samples
from nanoengine.runner.stream import Mark, Stream, open_stream
from nanoengine.runner.warm_up import largest_batches

logger = logging.getLogger("nanoengine")


class Step:
    """A batch that was launched. Its fields are set when the device's work on it is launched too."""

    mark: Mark
    tokens: Tensor | None = None  # on the host, as soon as the mark is reached
    logprobs: Logprobs | None = None
    unwritten: list[str]

    def __init__(self, batch: ScheduledBatch):
        self.batch = batch

    def result(self) -> SampledBatch:
        """Wait for its end, and raise what went wrong in it."""
        self.mark.wait()
        sampled = SampledBatch([])
        if self.tokens is not None:
            sampled = read_samples(self.tokens, self.logprobs, self.batch.sampling)
        sampled.unwritten = self.unwritten
        return sampled


class ModelRunner:
    """Loads a model and sizes its KV cache; then `launch` begins a ScheduledBatch, whose `result` is a SampledBatch.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        folder: where its weights are.
        use_tqdm: show bars while loading and recording.
        stream: in place of that of the device that the options name.

    Attributes:
        num_blocks: usable blocks of the KV pool.
        num_host_blocks: slots of the host tier.
        max_model_len: the one asked for, or the model's own lowered to what the pool holds.

    Raises:
        InvalidConfig, KVCacheTooSmall: the options cannot work on this machine.
        ModelNotFound, InvalidWeights: the weights are missing or wrong.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,
        *,
        use_tqdm: bool = True,
        stream: Stream | None = None,
    ):
        self.config = config
        self.stream = open_stream(find_device(config.device)) if stream is None else stream
        self.device = place = self.stream.torch_device
        self.dtype = choose_dtype(config.dtype, model_config.dtype, place)
        self.model_config = model_config
        self.folder = folder
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.kernels = choose_kernels(config.kernels, place, self.dtype)
        attention = config.attention_backend
        if attention == "auto" and self.kernels.name == "torch":
            attention = "torch"  # what others need, the kernels that were made for the device need too
        self.backend, self._passed_over = choose_backend(attention, place, self.dtype, model_config, config.block_size)
        self.num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)  # each computes a token in a step
        self.model = self._build_model()
        load_weights(self.model.checkpoint_tensors(), folder, use_tqdm=use_tqdm)
        self.sampler = Sampler(self.kernels, self.stream)
        # Where a step's numbers arrive. Graphs read them there; steps follow one another, so one place is enough.
        most = Layout(self.num_rows, max(config.max_num_batched_tokens, self.num_rows), self.num_rows)
        self._numbers = torch.empty(most.size, dtype=torch.int32, device=place)
        limit = model_config.max_position_embeddings
        pool = size_pool(config, limit, self.block_bytes, place, self._measure_gpu_kv_bytes)
        self.num_blocks, self.max_model_len, self._kv_source = pool.num_blocks, pool.max_model_len, pool.source
        self.rows = self._new_rows(self.max_model_len)
        self.kv_cache: KVCache | None = self._new_kv_cache(self.num_blocks)
        self.num_host_blocks = self._host_bytes() // self.block_bytes
        self.mover = KVMover(self.kv_cache.layers, self.num_host_blocks)
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda":
            self._compile_kernels()
        if self.uses_graphs:
            self.graphs = self._record_all_graphs(use_tqdm)
        logger.info("%s", self.describe())

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps are recorded: everything in them can be."""
        can_be = self.stream.can_record and self.kernels.capturable and self.backend.capturable
        return can_be and not self.config.enforce_eager

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that are worth launching before the results of the first are taken."""
        wanted = self.config.async_scheduling
        if wanted is None:
            wanted = self.device.type == "cuda" and not self.config.uses_lower_tiers
        return 2 if wanted else 1

    # ---- steps

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Step:
        """Begin a step: write the K/V of its tokens, and sample a token for each row that asks for one.

        What the device reads is packed before this returns; the batch's lists may change after that.
        """
        if self.kv_cache is None:
            raise EngineClosed("the model runner is closed")
        step = Step(batch)
        bucket = self._bucket(batch)
        changes = self.rows.find_changes(batch)
        layout, numbers = pack(batch, self.rows, self.stream, bucket) if batch else (None, None)
        shape = shape_of(batch, layout, self.config.block_size) if layout is not None and bucket is None else None

        self.stream.run(partial(self._execute, step, layout, numbers, changes, shape))
        step.mark = self.stream.mark()
        return step

    @torch.inference_mode()
    def _execute(
        self, step: Step, layout: Layout | None, numbers: Tensor | None, changes: Changes, shape: Shape | None
    ) -> None:
        """The device's part of a step; without a shape it is a recorded one, without a layout only its transfers."""
        self.rows.apply(changes)
        step.unwritten = self.mover.run(step.batch.transfers)
        if layout is None or numbers is None:
            return
        self._numbers[: layout.size].copy_(numbers, non_blocking=True)
        tokens: Tensor | None
        if shape is None:
            assert self.graphs is not None
            tokens = self.graphs.repeat(layout.num_seqs)
        else:
            tokens, step.logprobs = self._run(shape, step.batch)
        if tokens is not None:  # a copy also on the CPU: the next recorded step writes to the same tensor
            step.tokens = tokens.to("cpu", non_blocking=True, copy=True)

    def _bucket(self, batch: ScheduledBatch) -> int | None:
        """The size of the recorded step that a batch can run in, if there is one."""
        if self.graphs is None or batch.phase is not Phase.DECODE or not batch or not is_plain(batch.sampling):
            return None
        return bucket_for(len(batch), self.graphs.buckets)

    def _run(self, shape: Shape, batch: ScheduledBatch | None) -> tuple[Tensor | None, Logprobs | None]:
        """A step whose numbers have arrived. Without a batch, one of which tokens are all that is wanted."""
        assert self.kv_cache is not None
        block_size, layers = self.config.block_size, self.kv_cache.layers
        inputs = unpack(shape, self._numbers, self.rows, self.kernels, layers, block_size)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.metadata)
        if not shape.layout.num_samples:
            return None, None
        if shape.phase is Phase.PREFILL:  # a decode step samples from each of its rows
            hidden = hidden.index_select(0, inputs.sampled_tokens)
        logits = self.model.compute_logits(hidden)
        sampling = [] if batch is None else batch.sampling
        into = inputs.sampled_into
        tokens, logprobs = self.sampler.sample(logits, self.rows.sampling, into, inputs.sampled_positions, sampling)
        self.rows.newest.index_copy_(0, into.long(), tokens)
        return tokens, logprobs

    def close(self) -> None:
        """Give the memory of the model and the cache back."""
        self.kv_cache = self.graphs = None
        del self.model, self.mover, self.rows
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
        kv_bytes = self.num_blocks * self.block_bytes
        config, model = self.config, self.model_config
        limit = model.max_position_embeddings
        is_lowered = config.max_model_len is None and self.max_model_len < limit
        lowered = f" (lowered from {limit} to what the KV pool holds)" if is_lowered else ""
        passed_over = f"; not {self._passed_over}" if self._passed_over else ""
        steps = "overlapping steps" if self.max_steps_in_flight > 1 else "one step at a time"
        graphs = "no CUDA graphs" if self.graphs is None else f"{len(self.graphs.buckets)} CUDA graphs"
        return (
            f"{config.model}: {model.architecture}, {model.num_parameters() / 1e6:.1f} M parameters, "
            f"{str(self.dtype).removeprefix('torch.')} on {device_name(self.device)}; "
            f"kernels: {self.kernels.name} ({self.kernels.description}); "
            f"attention: {self.backend.name} ({self.backend.description}{passed_over}), {graphs}, {steps}; "
            f"KV pool: {kv_bytes / 2**20:.0f} MiB = {self.num_blocks} blocks x {config.block_size} tokens ({self._kv_source}); "
            f"{self._describe_tiers()}"
            f"max_model_len {self.max_model_len}{lowered}; "
            f"at most {self.num_rows} sequences and {config.max_num_batched_tokens} tokens a step"
        )

    def _describe_tiers(self) -> str:
        host = f"{self.num_host_blocks} blocks in host memory; " if self.num_host_blocks else ""
        disk = f"KV on disk: {self.config.kv_disk_path}; " if self.config.kv_disk_path else ""
        return host + disk

    # ---- making

    @property
    def block_bytes(self) -> int:
        return self.model_config.kv_bytes_per_token(self.dtype.itemsize) * self.config.block_size

    def _build_model(self) -> Qwen3ForCausalLM:
        try:
            return build_model(self.model_config, self.kernels, self.backend, self.dtype, self.device)
        except torch.OutOfMemoryError as error:
            raise InvalidConfig(
                f"the weights take {self.model_config.num_parameters() * self.dtype.itemsize} bytes, more than is free on "
                f"{device_name(self.device)}: free memory there, or choose another device"
            ) from error

    def _record_all_graphs(self, use_tqdm: bool) -> DecodeGraphs:
        try:
            return self._record_graphs(bucket_sizes(self.num_rows), use_tqdm)
        except torch.OutOfMemoryError as error:
            raise KVCacheTooSmall(
                "the CUDA graphs do not fit beside the KV pool: lower gpu_memory_utilization, kv_cache_memory, num_kv_blocks or "
                "max_num_seqs, or set enforce_eager=True"
            ) from error

    def _new_rows(self, max_len: int) -> Rows:
        return Rows(self.num_rows, -(-max_len // self.config.block_size), self.stream)

    def _new_kv_cache(self, num_blocks: int) -> KVCache:
        try:
            return KVCache(num_blocks, self.model_config, self.backend, self.dtype, self.device)
        except (
            RuntimeError,
            OSError,
        ) as error:  # torch's allocators raise the first or a subclass of it, mmap the second
            raise InvalidConfig(
                f"a KV pool of {num_blocks} blocks takes {num_blocks * self.block_bytes} bytes, which "
                "this device does not have: lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
            ) from error

    def _compile_kernels(self) -> None:
        """Run two small steps in the empty pool, so that the first request need not wait for Triton's compiler."""
        length = min(self.max_model_len, self.config.max_num_batched_tokens, 4 * self.config.block_size)
        for batch in largest_batches(1, length, length, self.config.block_size):
            self.launch(batch).result()

    @torch.inference_mode()
    def _record_graphs(self, buckets: list[int], use_tqdm: bool) -> DecodeGraphs:
        longest = self.rows.width * self.config.block_size

        def prepare(size: int) -> None:
            _, padding = pack(ScheduledBatch(Phase.DECODE), self.rows, self.stream, size)
            self._numbers[: len(padding)].copy_(padding)

        def run(size: int) -> Tensor:
            layout, ones, lengths = Layout.of_decode(size), [1] * size, [longest] * size
            tokens, _ = self._run(Shape(layout, Phase.DECODE, ones, lengths, self.rows.width), None)
            assert tokens is not None
            return tokens

        return DecodeGraphs(self.stream.recorder(), buckets, prepare, run, use_tqdm=use_tqdm)

    def _host_bytes(self) -> int:
        if self.config.kv_host_memory is not None:
            return self.config.kv_host_memory
        return 0 if self.config.preemption_mode == "recompute" else host_kv_bytes()

    # ---- measuring

    def _measure_gpu_kv_bytes(self) -> int:
        """Memory that steps of full size and the graphs leave for the KV pool, found by running and recording them."""
        config, device = self.config, self.device
        max_len = config.max_model_len or self.model_config.max_position_embeddings
        batches = largest_batches(self.num_rows, config.max_num_batched_tokens, max_len, config.block_size)
        self.rows, self.graphs = self._new_rows(max_len), None
        self.kv_cache = cache = self._new_kv_cache(max(map(max, batches[0].block_tables)))
        self.mover = KVMover(cache.layers, 0)
        cache.fill(0.0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        current = torch.cuda.memory_reserved(device)
        try:
            for batch in batches:
                self.launch(batch).result()
            peak = torch.cuda.max_memory_reserved(device)
            graph_bytes = self._measure_graph_bytes() if self.uses_graphs else 0
        except torch.OutOfMemoryError as error:
            raise KVCacheTooSmall(
                f"a step of max_num_batched_tokens {config.max_num_batched_tokens} or max_num_seqs {config.max_num_seqs} "
                "does not fit in the memory that the weights leave, before any KV pool: lower them, or free memory on the device"
            ) from error
        del cache, self.mover, self.rows
        self.kv_cache = None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return gpu_kv_bytes(total, free, config.gpu_memory_utilization, peak - current + graph_bytes)

    @torch.inference_mode()
    def _measure_graph_bytes(self) -> int:
        """What recording all sizes will take: the largest, and for each other what the next one adds."""
        buckets = bucket_sizes(self.num_rows)
        torch.cuda.empty_cache()
        free = [torch.cuda.mem_get_info(self.device)[0]]
        graphs = self._record_graphs([], use_tqdm=False)
        for size in buckets[-1:-3:-1]:
            graphs.record(size)
            free.append(torch.cuda.mem_get_info(self.device)[0])
        taken = [max(before - after, 0) for before, after in pairwise(free)]
        return taken[0] + sum(taken[1:]) * (len(buckets) - 1)
