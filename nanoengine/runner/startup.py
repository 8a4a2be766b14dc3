"""Startup: puts a ModelRunner together: kernels, backend and model, the KV pool as large as memory allows, recorded steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
import xxhash
from torch import Tensor

from nanoengine.attention.backend import AttentionBackend, choose_backend
from nanoengine.config import EngineConfig
from nanoengine.engine.executor import ExecutorInfo
from nanoengine.engine.kv.groups import Groups, KVGroup, KVSpec, group_layers
from nanoengine.engine.messages import UNKNOWN
from nanoengine.errors import InvalidConfig, KVCacheTooSmall
from nanoengine.kernels.interface import choose_kernels
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from nanoengine.models.architectures import read_model_config
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.decoder import Decoder, attention_specs, build_model
from nanoengine.models.description import config_table
from nanoengine.models.loader import Quantizer, check_weights, load_weights, open_checkpoint, weight_bytes
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import WEIGHT_FILES, find_model
from nanoengine.models.placement import check_room_for_weights, choose_dtype, device_name, find_device
from nanoengine.progress import stage
from nanoengine.quantization.at_load import quantizer
from nanoengine.runner.draft_model import DraftModel
from nanoengine.runner.graphs import (
    DRAFTED_TOKENS,
    MOST_ON_CPU,
    Graphs,
    RecordedSteps,
    bucket_for,
    bucket_sizes,
    drafted_bucket_for,
    drafted_sizes,
    prompt_sizes,
)
from nanoengine.runner.kv_cache import KVCache, bytes_of_layer, kv_specs
from nanoengine.runner.kv_mover import KVMover
from nanoengine.runner.kv_sizing import PoolSize, gpu_kv_bytes, size_host_tier, size_pool
from nanoengine.runner.model_runner import ModelRunner, Parts
from nanoengine.runner.rows import Rows
from nanoengine.runner.sampler import Sampler
from nanoengine.runner.step_timing import StepTiming, time_steps
from nanoengine.runner.stream import Stream, open_stream
from nanoengine.runner.warm_up import largest_plans

logger = logging.getLogger("nanoengine")


def start_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    *,
    use_tqdm: bool = True,
    stream: Stream | None = None,
) -> ModelRunner:
    """Load a model, size its KV cache and record its decode steps, as far as the options and the machine allow.

    Args:
        config: the engine's options.
        model_config: the model's shape.
        path: where its weights are: a folder or a file.
        use_tqdm: show what is being done: compiling, loading, recording.
        stream: in place of that of the device that the options name.

    Raises:
        InvalidConfig, KVCacheTooSmall: the options cannot work on this machine.
        ModelNotFound, InvalidWeights: the weights are missing or wrong.
    """
    startup = Startup(config, model_config, path, stream, use_tqdm=use_tqdm)
    runner = startup.build()
    logger.info("%s", startup.describe(runner))
    return runner


class LoadedDraft(NamedTuple):
    """A draft model without room for its K/V."""

    config: ModelConfig
    model: Decoder
    backend: AttentionBackend
    fingerprint: str


class Startup:
    """What is known on the way to a runner; see `start_runner`."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, path: Path, stream: Stream | None, *, use_tqdm: bool
    ):
        model_config = model_config.within(config.max_model_len or model_config.max_position_embeddings)
        self.config, self.model_config, self.use_tqdm = config, model_config, use_tqdm
        self.checkpoint = open_checkpoint(path)
        self.stream = open_stream(find_device(config.device)) if stream is None else stream
        self.device = self.stream.torch_device
        self.dtype = choose_dtype(config.dtype, model_config.dtype, self.device)
        self.kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else self.dtype
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        exact = config.activation_dtype == "float32"
        self.kernels = choose_kernels(config.kernels, self.device, self.dtype, exact=exact, use_tqdm=use_tqdm)
        if self.kernels.name != "native" and config.activation_dtype == "int8":
            raise InvalidConfig(
                f"activation_dtype is 'int8', but the {self.kernels.name} kernels round none ({self.kernels.description}): "
                "use activation_dtype='auto', or a device and dtype that the native kernels compute on"
            )
        self._check_room()
        attention = config.attention_backend
        if attention == "auto" and self.kernels.name == "torch":
            attention = "torch"  # what others need, the kernels that were made for the device need too
        self.quantize = None if config.quantization is None else self._choose_quantizer(config.quantization)
        self.backend, self.passed_over = choose_backend(
            attention,
            self.device,
            self.dtype,
            model_config,
            config.block_size,
            attention_specs(model_config),
            quantized=self.kv_dtype is torch.int8,
        )
        self.num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)  # each computes a token in a step
        self.kv_groups = group_layers(kv_specs(model_config))
        specs = tuple(group.spec for group in self.kv_groups)
        self.groups = Groups(specs, config.block_size, config.most_new_tokens)
        layers_per_block = max(len(group.layers) for group in self.kv_groups)
        self.block_bytes = bytes_of_layer(model_config, self.backend, self.kv_dtype) * layers_per_block
        self.model = self._load_model(model_config, self.backend, self.checkpoint)
        self.draft = None if config.draft_model is None else self._load_draft_model(config.draft_model)
        if self.draft is not None:
            draft = self.draft.config
            self.block_bytes += bytes_of_layer(draft, self.draft.backend, self.kv_dtype) * draft.num_layers

    def build(self) -> ModelRunner:
        config = self.config
        model = self.model_config
        limit = model.max_position_embeddings if config.max_model_len is None else model.longest
        self.pool = size_pool(config, limit, self.groups, self.block_bytes, self.device, self._measure_gpu_kv_bytes)
        self.num_host_blocks = size_host_tier(config, self.pool.max_model_len, self.groups, self.block_bytes)
        runner = self._new_runner(self.pool, self.num_host_blocks)
        runner.info = ExecutorInfo(
            num_blocks=self.pool.num_blocks,
            groups=self.groups.specs,
            num_host_blocks=self.num_host_blocks,
            max_model_len=self.pool.max_model_len,
            num_rows=self.num_rows,
            block_bytes=self.block_bytes,
            max_steps_in_flight=self.max_steps_in_flight,
            copy_bytes_per_second=runner.mover.measure_copy_rate() if config.preemption_mode == "auto" else None,
            kv_fingerprint=self._kv_fingerprint() if config.kv_disk_path is not None else None,
        )
        if self.device.type == "cuda":
            self._compile_kernels(runner)
        if self.uses_graphs:
            try:
                prompts = self._prompt_sizes(self.pool.max_model_len)
                runner.graphs = self._record(runner, self._decode_sizes(), self._drafted_sizes(), prompts)
            except torch.OutOfMemoryError as error:
                raise KVCacheTooSmall(
                    "the CUDA graphs do not fit beside the KV pool: lower gpu_memory_utilization, kv_cache_memory, num_kv_blocks "
                    "or max_num_seqs, or set enforce_eager=True"
                ) from error
        if config.speculation is not None:
            with stage("Measuring steps", shown=self.use_tqdm):
                timing = self._time_steps(runner)
            runner.info = replace(runner.info, step_seconds=timing.seconds, guess_share=timing.guess_share)
        return runner

    def _time_steps(self, runner: ModelRunner) -> StepTiming:
        return time_steps(
            lambda plan: runner.launch(plan).result(),
            num_rows=self.num_rows,
            max_tokens=self.config.max_num_batched_tokens,
            max_len=self.pool.max_model_len,
            num_blocks=self.pool.num_blocks,
            block_size=self.config.block_size,
            num_groups=len(self.groups),
            guesses=self.draft is not None,
        )

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are recorded: everything in them can be."""
        can_be = self.stream.can_record and self.kernels.capturable and self.backend.capturable
        if not self.stream.records_ahead:  # then it is the calls of C functions that are recorded
            can_be = can_be and self.kernels.name == self.backend.name == "native"
        has_draft = self.draft is not None  # a model that runs in all steps, and is not recorded
        return can_be and not self.config.enforce_eager and not has_draft

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that are worth launching before the results of the first are taken."""
        wanted = self.config.async_scheduling
        return 2 if (self.device.type == "cuda" if wanted is None else wanted) else 1

    def describe(self, runner: ModelRunner) -> str:
        """The start-up line: what runs where, by which path, and how much KV there is."""
        config, model, pool = self.config, self.model_config, self.pool
        limit = model.max_position_embeddings
        is_lowered = config.max_model_len is None and pool.max_model_len < limit
        lowered = f" (lowered from {limit} to what the KV pool holds)" if is_lowered else ""
        passed_over = f"; not {self.passed_over}" if self.passed_over else ""
        steps = "overlapping steps" if self.max_steps_in_flight > 1 else "one step at a time"
        guesses = f"speculation: {config.speculation}; " if config.speculation else ""
        kind = "CUDA graphs" if self.stream.records_ahead else "recorded steps"
        graphs = f"no {kind}" if runner.graphs is None else f"{len(runner.graphs)} {kind}"
        int8 = " of int8" if self.kv_dtype is torch.int8 else ""
        host = f"{self.num_host_blocks} blocks in host memory; " if self.num_host_blocks else ""
        disk = f"KV on disk: {config.kv_disk_path}; " if config.kv_disk_path else ""
        return (
            f"{config.model}: {model.architecture}, {model.num_parameters() / 1e6:.1f} M parameters, "
            f"{str(self.dtype).removeprefix('torch.')} on {device_name(self.device)}; "
            f"kernels: {self.kernels.name} ({self.kernels.description}); {self._describe_weights()}"
            f"attention: {self.backend.name} ({self.backend.description}{passed_over}), {graphs}, {steps}; "
            f"KV pool: {pool.num_blocks * self.block_bytes / 2**20:.0f} MiB{int8} = {pool.num_blocks} blocks x "
            f"{config.block_size} tokens ({pool.source}); {self._describe_groups()}{host}{disk}{guesses}"
            f"max_model_len {pool.max_model_len}{lowered}; "
            f"{config.scheduling_policy}, at most {self.num_rows} sequences and {config.max_num_batched_tokens} tokens a step"
        )

    def _describe_groups(self) -> str:
        """Which layers share tables, and how much of the pool is padding; nothing if all do."""
        if len(self.kv_groups) == 1:
            return ""
        kinds = Counter(str(group.spec) for group in self.kv_groups)
        names = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        size = max(len(group.layers) for group in self.kv_groups)
        padding = len(self.kv_groups) * size - self.model_config.num_layers
        padded = f", {padding} of {len(self.kv_groups) * size} places are padding" if padding else ""
        return f"{len(self.kv_groups)} KV groups ({names}), a block holds {size} layers{padded}; "

    def _describe_weights(self) -> str:
        """Bytes of all matrices by format, and how those that are quantized are multiplied."""
        formats: Counter[str] = Counter()
        for matrix in self.model.matrices:
            formats.update(matrix.formats())
        listed = " + ".join(f"{size / 2**20:.1f} MiB in {name}" for name, size in formats.most_common())
        plain = str(self.dtype).removeprefix("torch.")
        products = f" ({self.kernels.quantized_products})" if formats.keys() - {plain} else ""
        return f"weights: {listed}{products}; "

    # ---- making

    def _check_room(self) -> None:
        if self.kernels.name == "native":
            num_bytes = weight_bytes(self.checkpoint, self.dtype, self.config.quantization)
        else:  # on a CPU, others compute with numbers
            num_bytes = self.model_config.num_parameters() * self.dtype.itemsize
        check_room_for_weights(num_bytes, self.device)

    def _choose_quantizer(self, name: str) -> Quantizer:
        missing = "the native and torch kernels know no products of them" if self.kernels.name != "triton" else None
        return quantizer(name, missing or float8_unsupported_reason(self.device))

    def _load_model(self, config: ModelConfig, backend: AttentionBackend, checkpoint: Checkpoint) -> Decoder:
        try:
            model = build_model(config, self.kernels, backend, self.dtype, self.device)
        except torch.OutOfMemoryError as error:
            raise InvalidConfig(
                f"the weights take {config.num_parameters() * self.dtype.itemsize} bytes, more than is free on "
                f"{device_name(self.device)}: free memory there, or choose another device"
            ) from error
        places = model.checkpoint_tensors()
        load_weights(places, checkpoint, self.dtype, quantize=self.quantize, use_tqdm=self.use_tqdm)
        return model

    def _load_draft_model(self, name: str) -> LoadedDraft:
        path, limit = find_model(name, WEIGHT_FILES), self.model_config.max_position_embeddings
        config = read_model_config(config_table(path))
        asked = self.config.max_model_len or limit
        if asked > config.longest:
            raise InvalidConfig(
                f"speculation is 'model:{name}', which was made for at most {config.longest} positions, and max_model_len is "
                f"{asked}: lower it, or choose another model"
            )
        if KVSpec() not in self.groups.specs:
            raise InvalidConfig(
                f"speculation is 'model:{name}', but every layer of {self.config.model} has a window: a draft model's K/V lies "
                "in the blocks of layers that see everything; choose another speculation"
            )
        checkpoint, config = open_checkpoint(path), config.within(asked)
        check_weights(config, checkpoint)
        attention, specs = self.config.attention_backend, attention_specs(config)
        if attention == "auto" and self.kernels.name == "torch":
            attention = "torch"
        is_int8 = self.kv_dtype is torch.int8
        where = self.device, self.dtype, config, self.config.block_size
        backend, _ = choose_backend(attention, *where, specs, quantized=is_int8)
        return LoadedDraft(config, self._load_model(config, backend, checkpoint), backend, checkpoint.fingerprint())

    def _new_runner(self, pool: PoolSize, num_host_blocks: int) -> ModelRunner:
        """A runner with a pool of this size, and nothing recorded."""
        config = self.config
        self.model.prepare(pool.max_model_len)
        kv_cache = self._new_kv_cache(pool.num_blocks, self.model_config, self.kv_groups, self.backend)
        width = -(-pool.max_model_len // config.block_size)
        rows = Rows(self.num_rows, len(self.groups), width, self.stream)
        sampler = Sampler(self.num_rows, self.model_config.vocab_size, self.kernels, self.stream)
        draft = None if self.draft is None else self._new_draft_model(self.draft, pool, rows, sampler)
        return ModelRunner(
            Parts(
                stream=self.stream,
                kernels=self.kernels,
                backend=self.backend,
                model=self.model,
                sampler=sampler,
                rows=rows,
                kv_cache=kv_cache,
                mover=KVMover([*kv_cache.places, *(draft.kv_cache.places if draft else ())], num_host_blocks),
                draft_model=draft,
                block_size=config.block_size,
                max_num_batched_tokens=config.max_num_batched_tokens,
            )
        )

    def _new_draft_model(self, draft: LoadedDraft, pool: PoolSize, rows: Rows, sampler: Sampler) -> DraftModel:
        draft.model.prepare(pool.max_model_len)
        # Layers with windows keep what they see no more.
        layers = KVGroup(KVSpec(), tuple(range(draft.config.num_layers)))
        return DraftModel(
            model=draft.model,
            kv_cache=self._new_kv_cache(pool.num_blocks, draft.config, [layers], draft.backend),
            group=self.groups.specs.index(KVSpec()),
            kernels=self.kernels,
            rows=rows,
            stream=self.stream,
            table=sampler.table,
            vocab_size=self.model_config.vocab_size,
            block_size=self.config.block_size,
        )

    def _new_kv_cache(
        self, num_blocks: int, model: ModelConfig, groups: list[KVGroup], backend: AttentionBackend
    ) -> KVCache:
        try:
            return KVCache(num_blocks, model, groups, backend, self.kv_dtype, self.device)
        except (RuntimeError, OSError) as error:  # torch's allocators raise the first or a subclass, mmap the second
            raise InvalidConfig(
                f"a KV pool of {num_blocks} blocks takes {num_blocks * self.block_bytes} bytes, which "
                "this device does not have: lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
            ) from error

    def _compile_kernels(self, runner: ModelRunner) -> None:
        """Run small steps in the empty pool, so that the first request need not wait for Triton's compiler."""
        config = self.config
        room = self.pool.num_blocks * config.block_size
        length = min(self.pool.max_model_len, config.max_num_batched_tokens, 4 * config.block_size, room)
        with stage("Compiling kernels", shown=self.use_tqdm):
            for plan in largest_plans(1, length, length, config.block_size, len(self.groups)):
                runner.launch(plan).result()

    def _record(
        self, runner: ModelRunner, decodes: list[int], drafted: list[tuple[int, int]], prompts: list[int]
    ) -> Graphs:
        recorder = self.stream.recorder()

        def steps(
            name: str,
            sizes: list[Any],
            choose: Callable[..., Any],
            prepare: Callable[[Any], None],
            run: Callable[[Any], Tensor],
        ) -> RecordedSteps[Any]:
            shown = name if self.use_tqdm and sizes else None
            ahead = self.stream.records_ahead
            # The runner holds them: they must not hold it.
            return RecordedSteps(recorder, sizes, _weak(prepare), _weak(run), shown, choose=choose, ahead=ahead)

        return Graphs(
            prompts=steps("prompts", prompts, bucket_for, runner.prepare_prompt, runner.prompt_logits),
            drafted=steps("drafts", drafted, drafted_bucket_for, runner.prepare_drafted, runner.drafted_logits),
            decodes=steps("decodes", decodes, bucket_for, runner.prepare_decodes, runner.decode_logits),
        )

    def _decode_sizes(self) -> list[int]:
        if self.stream.records_ahead:
            return bucket_sizes(self.num_rows)
        return list(range(1, min(self.num_rows, MOST_ON_CPU) + 1))

    def _prompt_sizes(self, max_len: int) -> list[int]:
        return prompt_sizes(self.config.max_num_batched_tokens, max_len) if self.backend.captures_prompts else []

    def _drafted_sizes(self) -> list[tuple[int, int]]:
        """A run of padding is longer than the others, which only those bear who record prompts, too."""
        if self.config.speculation is None or not self.backend.captures_prompts:
            return []
        most = min(self.num_rows, self.config.max_num_batched_tokens // DRAFTED_TOKENS[-1])
        return drafted_sizes(most, self.config.num_drafts)

    def _kv_fingerprint(self) -> str:
        """Of all that K/V depends on but tokens: the weights, their use, and the layout of a block."""
        model, weights = self.model_config, self.checkpoint.fingerprint()
        angles = model.angles_of(self.pool.max_model_len)
        draft = self.draft and (self.draft.fingerprint, self.draft.config, self.draft.backend.name)
        how = self.config.quantization, self.kernels.name, self.kernels.fingerprint, self.kernels.quantized_products
        stored = self.dtype, self.kv_dtype, self.backend.name, self.config.block_size
        parts = (weights, *how, *stored, model, self.kv_groups, angles, draft)
        return xxhash.xxh3_128_hexdigest(repr(parts).encode())

    # ---- measuring

    def _measure_gpu_kv_bytes(self) -> int:
        """Memory that steps of full size and the graphs leave for the KV pool, found by running and recording them."""
        config, device = self.config, self.device
        max_len = config.max_model_len or self.model_config.max_position_embeddings
        draft = None if config.speculation is None else UNKNOWN if self.draft else 0
        largest = (self.num_rows, config.max_num_batched_tokens, max_len, config.block_size, len(self.groups))
        plans = largest_plans(*largest, draft=draft)
        most = max(max(start.tables[0]) for plan in plans for start in plan.started)
        runner = self._new_runner(PoolSize(most, max_len, "measuring"), 0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        current = torch.cuda.memory_reserved(device)
        try:
            for plan in plans:
                runner.launch(plan).result()
            peak = torch.cuda.max_memory_reserved(device)
            graph_bytes = self._measure_graph_bytes(runner, max_len) if self.uses_graphs else 0
        except torch.OutOfMemoryError as error:
            raise KVCacheTooSmall(
                f"a step of max_num_batched_tokens {config.max_num_batched_tokens} or max_num_seqs {config.max_num_seqs} "
                "does not fit in the memory that the weights leave, before any KV pool: lower them, or free memory on the device"
            ) from error
        table_bytes = runner.rows.tables.nbytes  # the runner to come has as many
        runner.close()
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return gpu_kv_bytes(total, free, config.gpu_memory_utilization, peak - current + graph_bytes + table_bytes)

    @torch.inference_mode()
    def _measure_graph_bytes(self, runner: ModelRunner, max_len: int) -> int:
        """What recording all sizes will take: of both kinds the largest, and for each other what the next one adds."""
        graphs = self._record(runner, [], [], [])
        total = 0
        kinds: tuple[tuple[RecordedSteps[Any], list[Any]], ...] = (
            (graphs.prompts, self._prompt_sizes(max_len)),
            (graphs.drafted, self._drafted_sizes()),
            (graphs.decodes, self._decode_sizes()),
        )
        for steps, sizes in (kind for kind in kinds if kind[1]):
            torch.cuda.empty_cache()
            free = [torch.cuda.mem_get_info(self.device)[0]]
            for size in sizes[-1:-3:-1]:
                steps.record(size)
                free.append(torch.cuda.mem_get_info(self.device)[0])
            taken = [max(before - after, 0) for before, after in pairwise(free)]
            total += sum(taken[:1]) + sum(taken[1:]) * (len(sizes) - 1)
        return total


def _weak(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A bound method that does not keep its object."""
    held = WeakMethod(method)

    def call(size: Any) -> Any:
        found = held()
        assert found is not None
        return found(size)

    return call
