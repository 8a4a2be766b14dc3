"""Startup: from options to an engine that is ready to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from nanoengine.core.attention import AttentionSpec, CoreAttentionBackend
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.capability import Capability
from nanoengine.core.config import EngineConfig
from nanoengine.core.device import Device, open_device
from nanoengine.core.errors import InvalidConfig, KVCacheTooSmall, shown
from nanoengine.core.inputs import Rows
from nanoengine.core.kernels import CoreKernels
from nanoengine.core.kv_cache import KVCache, size_pool
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.messages import RowSampling, Run, Started, StepPlan
from nanoengine.core.model_config import DenseConfig, Qwen3Config, read_config
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.qwen3 import DenseDecoder, build_qwen3
from nanoengine.core.sampler import Sampler
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import KVLayout, KVStore, PolicyPart
from nanoengine.core.tokenizer import Tokenizer, read_eos_token_ids, read_tokenizer
from nanoengine.core.torch_attention import CausalTorchAttention
from nanoengine.core.weights import load_weights

T = TypeVar("T")


class Startup:
    """Builds an engine in stages. The attributes are in the order of the stages that set them; later stages read them."""

    num_ranks = 1  # processes with parts of the model
    runner_elsewhere = False  # other processes compute: nothing is added to the runner
    gpus_elsewhere = False  # on GPUs
    new_carrier: Callable[[int], Any] | None = None  # seed of all hashes -> carrier of replicas
    # Stage `describe`: the files of the model.
    model_config: DenseConfig
    tokenizer: Tokenizer
    eos_token_ids: Seq[int]
    num_kv_heads: int  # of each layer, in the pool of this process
    metadata: Mapping[str, Any] = {}  # of a GGUF file
    layers_library = unavailable_backends = ""  # words of the start-up line
    weights_key: Callable[[int], object] | None = None  # longest sequence -> key of the numbers in K/V
    attention_specs: Seq[AttentionSpec] = ()  # of each attention layer
    head_dims: Seq[int] = ()  # of layers; empty: as in the model
    windows: list[int | None] | None = None  # of each attention layer, in tokens; None: not set
    has_chunks = False  # whether windows are chunks
    state_shapes: Seq[tuple[int, ...]] | None = None  # of a layer with states; None: no such layer
    # Stage `load`: device, dtype, kernels, backend and model, in this order.
    device: Device
    dtype: torch.dtype
    kernels: CoreKernels
    backend: CoreAttentionBackend
    block_size: int  # as configured, or the default of the backend
    kv_dtype: torch.dtype | None = None  # None: as the model
    factory: Callable[..., Any] | None = None  # of the layers of a rank
    rows_of_rank: Mapping[int, Seq[range]] = {}  # id of a weight of a rank -> rows of it in the checkpoint
    model: DenseDecoder
    matrices: Seq[Any] = ()  # weights of linear layers
    # Stages `groups` and `before_pool`: the KV pool.
    groups: list[list[int]]  # layers of each KV group
    num_state_layers = 0
    most_drafts = 0  # of a sequence in a step
    draft: Startup | None = None  # of a draft model, whose K/V lies in the same blocks
    block_bytes = 0  # of one block
    later_bytes = 0  # of RAM that capabilities allocate after the pool is sized; on a CPU only
    num_blocks: int
    max_model_len: int
    # Stages `runner` and `policy`.
    runner: ModelRunner
    runs_eagerly = False  # no step can be recorded
    state_keeper: Any = None  # the runner's part for layers with states
    blocks: BlockManager
    snapshots: Any = None  # the policy's part for layers with states

    def __init__(self, config: EngineConfig, capabilities: Seq[Capability] = (), *, use_tqdm: bool = False):
        self.config, self.capabilities, self.use_tqdm = config, capabilities, use_tqdm
        self.path = Path(config.model)  # the folder or the file of the weights
        self.default_params = CoreSamplingParams()
        self.worst_case_params = CoreSamplingParams(top_k=10, top_p=0.9)  # of requests with most memory
        self.layouts: list[KVLayout] = [KVLayout()]
        self.blocks_needed: Callable[[int], int] = lambda n: -(-n // self.block_size)  # of a sequence of n tokens
        self.parts: list[PolicyPart] = []
        self.stores: list[KVStore] = []
        self.metric_sources: dict[str, Callable[[], Any]] = {}  # name of statistics -> their values now

    def build(self) -> LLMEngine:
        """All steps, in their order; the caller's thread may be in any mode of torch."""
        with torch.device("cpu"), torch.inference_mode(False), torch._C._DisableAutocast():
            config = self.config
            self.describe()
            self.load()
            self.groups = self._first_result("groups", lambda: [list(range(self.model_config.num_layers))])
            self._call_all("before_pool")
            self.block_bytes += self.bytes_of_block(self.groups)
            sized = config.num_kv_blocks is not None or config.kv_cache_memory is not None
            free = 0 if sized else self.device.kv_bytes(config.gpu_memory_utilization, self.measure, self.later_bytes)
            limit = self.model_config.max_position_embeddings
            self.num_blocks, self.max_model_len = size_pool(config, limit, self.blocks_needed, self.block_bytes, free)
            self._make_runner()
            pool = self.num_blocks, self.block_size, self.layouts, self.stores
            self.blocks = BlockManager(*pool, enable_prefix_caching=config.enable_prefix_caching)
            self._call_all("policy")
            return self._first_result("new_engine", self.new_engine)

    def describe(self) -> None:
        """Read the model's description from its files."""
        self.model_config, self.tokenizer, self.eos_token_ids = self._first_result("describe", self._describe)
        self.num_kv_heads = self.model_config.num_kv_heads

    def load(self) -> None:
        """Choose device, dtype, kernels and attention backend, and load the model with its weights."""
        config = self.config
        self.device = self._first_result("device", lambda: open_device(config.device))
        self.device.num_threads = config.num_threads or self.device.num_threads
        self.dtype = self._first_result("dtype", self._choose_dtype)
        self.kernels = self._first_result("kernels", CoreKernels)
        self.backend = self._first_result("backend", self._choose_backend)
        self.block_size = self.backend.block_size
        try:
            self.model = self._first_result("model", self._load_model)
        except torch.OutOfMemoryError as error:
            raise InvalidConfig(f"{self.device.torch_device} has no room for the weights: {error}") from error

    def bytes_of_block(self, groups: list[list[int]]) -> int:
        """Bytes of K and V of the model in one block."""
        return 2 * max(1, *map(len, groups)) * math.prod(self.block_shape) * (self.kv_dtype or self.dtype).itemsize

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of K, or of V, of one layer in one block."""
        return self.backend.kv_shape(1, self.num_kv_heads, self.model_config.head_dim)[1:]

    def _call_all(self, hook: str) -> None:
        """Call a hook of every capability."""
        for capability in self.capabilities:
            getattr(capability, hook)(self)

    def _first_result(self, hook: str, default: Callable[[], T], *args: Any) -> T:
        """The first result of a hook that is not None, or the default of the core."""
        results = (getattr(capability, hook)(self, *args) for capability in self.capabilities)
        result: T | None = next((result for result in results if result is not None), None)
        return default() if result is None else result

    def _describe(self) -> tuple[DenseConfig, Tokenizer, Seq[int]]:
        config = read_config(self.path)
        return config, read_tokenizer(self.path), read_eos_token_ids(self.path, config.vocab_size)

    def _choose_dtype(self) -> torch.dtype:
        """The configured dtype. "auto": as the checkpoint on a GPU, and float32 on a CPU, where torch computes it fastest."""
        auto = self.model_config.dtype if self.device.is_cuda else "float32"
        return cast(torch.dtype, getattr(torch, auto if self.config.dtype == "auto" else self.config.dtype))

    def _choose_backend(self) -> CoreAttentionBackend:
        if (name := self.config.attention_backend) not in ("auto", "torch"):
            raise InvalidConfig(f"attention_backend is {shown(name)}: it must be auto or torch")
        return CausalTorchAttention(self.config.block_size or CausalTorchAttention.default_block_size)

    def _load_model(self) -> DenseDecoder:
        assert isinstance(self.model_config, Qwen3Config)
        model = build_qwen3(self.model_config, self.kernels, self.backend, self.dtype, self.device.torch_device)
        load_weights(model.checkpoint_tensors(), Path(self.config.model))
        return model

    def measure(self) -> int:
        """Peak bytes of the largest steps on a GPU, beyond the bytes in use before."""
        before = torch.cuda.memory_allocated(self.device.torch_device)
        torch.cuda.reset_peak_memory_stats(self.device.torch_device)
        try:
            self.run_largest_steps()
        except torch.OutOfMemoryError as error:
            raise KVCacheTooSmall(
                "the largest steps do not fit beside the weights: lower max_num_batched_tokens, max_num_seqs or max_model_len"
            ) from error
        return torch.cuda.max_memory_allocated(self.device.torch_device) - before

    def run_largest_steps(self) -> None:
        """Run prompts, decodes, and decodes with drafts in a small pool, on a runner with the parts of all capabilities."""
        budget, size = self.config.max_num_batched_tokens, self.block_size
        length = min(budget, self.config.max_model_len or self.model_config.max_position_embeddings)
        self.num_blocks, self.max_model_len = -(-length // size), length
        self._make_runner()
        table = [list(range(1, self.num_blocks + 1)) for _ in self.groups]
        sampling = RowSampling(self.worst_case_params, 0, length)
        started = [Started(row, [0] * length, table, sampling) for row in range(self.num_rows)]
        prompts = [Run(row, 0, length, True) for row in range(min(self.num_rows, max(1, budget // length)))]
        self.runner.launch(StepPlan(started=started[: len(prompts)], runs=prompts))()
        rows, ends = np.arange(self.num_rows, dtype=np.int32), np.full(self.num_rows, length - 1, np.int32)
        self.runner.launch(StepPlan(started=started, decode_rows=rows, decode_starts=ends))()
        if num_drafts := min(self.most_drafts, length - 1):
            count, start = min(self.num_rows, budget // (1 + num_drafts)), length - 1 - num_drafts
            drafted = [Run(row, start, 1 + num_drafts, True, (0,) * num_drafts) for row in range(count)]
            self.runner.launch(StepPlan(started=started[:count], runs=drafted))()
        self.runner.close()
        del self.runner

    @property
    def depth(self) -> int:
        """Steps in flight."""
        is_async = self.config.async_scheduling
        return 2 if (self.device.torch_device.type == "cuda" if is_async is None else is_async) else 1

    @property
    def num_rows(self) -> int:
        """Limit of running sequences: each computes a token in a step."""
        return min(self.config.max_num_seqs, self.config.max_num_batched_tokens)

    def _make_runner(self) -> None:
        self.runner = self._first_result("new_runner", self.new_runner)
        if not self.runner_elsewhere:
            self._call_all("runner")

    def new_runner(self, kind: Callable[..., ModelRunner] = ModelRunner) -> ModelRunner:
        """A new runner, with a new pool."""
        self.model.prepare(self.max_model_len)
        kv_cache = self.new_kv_cache(self.num_blocks)
        rows = Rows(self.num_rows, len(self.groups), -(-self.max_model_len // self.block_size), self.device)
        sampler = Sampler(self.num_rows, self.model_config.vocab_size, self.kernels, self.device)
        return kind(self.model, kv_cache, rows, sampler, self.block_size, self.config.max_num_batched_tokens)

    def new_kv_cache(self, num_blocks: int) -> KVCache:
        """A new KV pool; raises InvalidConfig if the device has no memory for it."""
        layout = self.groups, self.block_shape, self.kv_dtype or self.dtype, self.device.torch_device
        try:
            return self._first_result("kv_cache", lambda: KVCache(num_blocks, *layout), num_blocks)
        except (RuntimeError, OSError) as error:  # torch's allocators raise the first or a subclass, mmap the second
            raise InvalidConfig(
                f"a KV pool of {num_blocks} blocks takes {num_blocks * self.block_bytes / 2**30:,.1f} GiB, which this device "
                "does not have: lower num_kv_blocks, kv_cache_memory or gpu_memory_utilization"
            ) from error

    def new_engine(self, kind: Callable[..., LLMEngine] = LLMEngine) -> LLMEngine:
        """The engine of this process."""
        config = self.config
        scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            max_chunk=config.long_prefill_token_threshold,
            parts=self.parts,
        )
        return kind(
            scheduler,
            self.runner,
            self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            depth=self.depth,
            seed=config.seed,
            default_params=self.default_params,
        )
