"""EngineConfig: what the user chooses."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanoengine.core.model_config import DTYPES, MAX_INT32
from nanoengine.errors import InvalidConfig, UnknownOption, shown

QUANTIZATIONS = ("int8", "int4", "int4-128", "fp8")
PROPOSERS = ("ngram", "suffix")
DRAFT_MODEL = "model:"
SCHEDULING_POLICIES = ("prefill_first", "mixed")

MAX_POSITIONS = 2**24
"""Longest sequence in tokens: tables are made for all of a sequence's blocks."""

MAX_LAYERS = 4096
MAX_PARAMETERS = 2**44
"""Beyond it the sizes of tensors in bytes come near to what 64 bits can say."""

MAX_OPTIONS = {
    "max_model_len": MAX_POSITIONS,
    "max_num_seqs": 2**16,
    "max_num_batched_tokens": 2**20,
    "long_prefill_token_threshold": 2**20,
    "block_size": 2**16,
    "num_kv_blocks": MAX_INT32 - 1,  # ids are 32 bits wide, and the null block is one more
    "kv_cache_memory": 2**50,
    "kv_host_memory": 2**50,
    "kv_disk_bytes": 2**60,
    "num_threads": 1024,
    "num_drafts": 15,  # attention verifies 16 tokens of a sequence at once
}
"""The most that the layers below can hold, or any machine has."""

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""As for the seed of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every option of the engine; all are keyword arguments of `LLM`. Names follow vLLM and nano-vllm.

    Args:
        model: "demo" (bundled), "smollm2" (once fetched), a local folder, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B".
        tokenizer: a folder or hub name, if the tokenizer is not the model's own.
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own where the device computes it natively,
            float32 otherwise.
        quantization: store weights in fewer bits than the checkpoint does: "int8" (a scale for each output), "int4" (groups of 32
            inputs with a scale and a zero point), "int4-128" (groups of 128), or "fp8" (on GPUs that multiply it, with
            activations to match). None: as in the files, which may be quantized themselves.
        activation_dtype: what activations are rounded to where they meet quantized weights: "int8" (by blocks of 16, so that
            products are sums of integers), "float32" (not rounded: the exact results of the stored weights), or "auto": int8
            where there are kernels for it.
        device: "cpu", "cuda", "cuda:1", or "auto": cuda if there is one.
        max_model_len: longest sequence (prompt and output) in tokens. None: the model's own limit, lowered to what the KV
            pool holds.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in one step; longer prompts are prefilled in chunks of it. It also
            bounds the running sequences, since each computes at least one token in a step.
        scheduling_policy: who comes first in a step. "prefill_first": prompts alone, while there are any that can start;
            it is the fastest for a closed batch. "mixed": every running sequence gets its next token, and prompts share what
            is left of the step, so that no answer stops while a long prompt is read.
        long_prefill_token_threshold: most tokens of one prompt in one step, so that long prompts leave room for short ones.
            None: as many as max_num_batched_tokens.
        max_client_share: most of the prompt tokens of a step that one client's requests take while others have requests too,
            so that nobody waits for all that another has sent; above 0, and 1 for no such limit.
        block_size: tokens in one block of the KV cache.
        num_kv_blocks: size of the KV pool in blocks (one more is taken for the null block). None: from memory.
        kv_cache_memory: size of the KV pool in bytes. None: from free memory.
        kv_cache_dtype: "auto" (that of the model), or "int8": 8-bit numbers and a scale for each token of a head, which is about
            half the bytes of bfloat16, and near it.
        gpu_memory_utilization: share of the GPU's memory that the engine may fill, weights included.
        enable_prefix_caching: reuse the KV of equal prefixes.
        preemption_mode: what happens to a sequence that must give its blocks back: "recompute" (prefill it again later),
            "swap" (copy them to host memory and back), or "auto" (whichever is expected to be faster).
        kv_host_memory: bytes of host memory for blocks that the pool has no room for. None: a quarter of the available RAM,
            at most 4 GiB, if preemption_mode needs it; without that, what kv_disk_path needs, and nothing otherwise.
        kv_disk_path: folder for blocks that neither has room for; a later engine with the same model finds them there.
            None: no such folder. Files go through host memory: with kv_host_memory None, at least one sequence's worth of it
            is taken for that, but no more than 256 MiB (or 16 blocks, where those are larger).
        kv_disk_bytes: how much that folder may hold for this model.
        num_threads: threads that compute on the CPU, for torch and the native kernels, and for all engines of this process.
            None: torch's own choice.
        kernels: "native" (compiled for this CPU), "triton" (for NVIDIA GPUs), "torch" (plain torch operations, attention too
            unless it is named), or "auto": those made for the device where they can run.
        attention_backend: "auto" (the fastest that can run), "flash_attn", "triton", "native" or "torch".
        enforce_eager: never use CUDA graphs.
        async_scheduling: schedule and launch a step while the one before it runs. None: on a GPU.
        speculation: guess tokens and verify several in one step, which changes no token: "ngram" (what followed the same tokens
            earlier in the request), "suffix" (the same, and in recent outputs of this engine, as far as it is likely), or
            "model:" and a model with the same tokenizer, of any kind that `model` may be. None: one token a step.
        num_drafts: most tokens that are guessed ahead of a sequence; how many are worth it, the engine finds out.
        tensor_parallel_size: number of GPUs that share the model; 1 is the only one built.
        seed: seed of the requests that have none of their own: a fresh engine repeats itself.

    Raises:
        InvalidConfig: a value that cannot work, or that is more than the layers below can hold.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    activation_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    scheduling_policy: str = "prefill_first"
    long_prefill_token_threshold: int | None = None
    max_client_share: float = 0.5
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    preemption_mode: str = "recompute"
    kv_host_memory: int | None = None
    kv_disk_path: str | None = None
    kv_disk_bytes: int = 16 << 30
    num_threads: int | None = None
    kernels: str = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    speculation: str | None = None
    num_drafts: int = 15
    tensor_parallel_size: int = 1
    seed: int = 0

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """Build a config from keyword arguments; an unknown one is an error that suggests the nearest known name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
                raise UnknownOption(f"unknown option {name!r}: {hint}")
        return cls(model=str(model), **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise InvalidConfig(f"model must be a string, not {shown(self.model)}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str | os.PathLike):
            raise InvalidConfig(f"tokenizer must be a folder, a hub name or None, not {shown(self.tokenizer)}")
        if self.kv_disk_path is not None and not isinstance(self.kv_disk_path, str):
            raise InvalidConfig(f"kv_disk_path must be a string or None, not {shown(self.kv_disk_path)}")
        _choice("dtype", self.dtype, ("auto", *DTYPES))
        if self.quantization is not None:
            _choice("quantization", self.quantization, QUANTIZATIONS)
        _choice("activation_dtype", self.activation_dtype, ("auto", "int8", "float32"))
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "int8"))
        _choice("preemption_mode", self.preemption_mode, ("recompute", "swap", "auto"))
        _choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if self.speculation is not None and not _is_speculation(self.speculation):
            raise InvalidConfig(
                f"speculation is {shown(self.speculation)}: it must be 'ngram', 'suffix', 'model:' and a model, or None"
            )
        _choice("kernels", self.kernels, ("auto", "native", "triton", "torch"))
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", self.device):
            raise InvalidConfig(f"device is {shown(self.device)}: it must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in MAX_OPTIONS and not (value is None and field.default is None):
                _count(field.name, value, MAX_OPTIONS[field.name])
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise InvalidConfig("num_kv_blocks and kv_cache_memory both size the KV pool: give one of them")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise InvalidConfig(f"async_scheduling must be True, False or None, not {shown(self.async_scheduling)}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfig(f"{name} must be True or False, not {shown(getattr(self, name))}")
        if not self.enable_prefix_caching and self.uses_lower_tiers:
            raise InvalidConfig(
                "enable_prefix_caching is False: blocks in host memory and on disk are found by their prefixes, so "
                "preemption_mode must be 'recompute', and kv_host_memory and kv_disk_path None"
            )
        for name in ("max_client_share", "gpu_memory_utilization"):
            share = getattr(self, name)
            if type(share) not in (int, float) or not 0.0 < share <= 1.0:
                raise InvalidConfig(f"{name} is {shown(share)}: it must be above 0 and at most 1")
        _count("tensor_parallel_size", self.tensor_parallel_size, MAX_INT32)
        if self.tensor_parallel_size != 1:
            raise InvalidConfig(f"tensor_parallel_size is {shown(self.tensor_parallel_size)}: only 1 is supported")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidConfig(f"seed must be an integer, not {shown(self.seed)}")
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise InvalidConfig(f"seed is {shown(self.seed)}: it must be at least {MIN_SEED} and at most {MAX_SEED}")

    @property
    def most_new_tokens(self) -> int:
        """Most tokens of one sequence in one step."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def draft_model(self) -> str | None:
        """The model that guesses tokens, if one does."""
        who = self.speculation or ""
        return who.removeprefix(DRAFT_MODEL) if who.startswith(DRAFT_MODEL) else None

    @property
    def uses_lower_tiers(self) -> bool:
        """Whether blocks may go to host memory or disk."""
        return bool(self.preemption_mode != "recompute" or self.kv_host_memory or self.kv_disk_path)


def _is_speculation(value: object) -> bool:
    return isinstance(value, str) and (
        value in PROPOSERS or (len(value) > len(DRAFT_MODEL) and value.startswith(DRAFT_MODEL))
    )


def _count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConfig(f"{name} is {shown(value)}: it must be a positive integer")
    if value > most:
        raise InvalidConfig(f"{name} is {shown(value)}: it must be at most {most}; lower it")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidConfig(f"{name} is {shown(value)}: it must be one of {', '.join(choices)}")
