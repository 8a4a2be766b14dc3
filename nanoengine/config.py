"""EngineConfig: what the user chooses. ModelConfig: what the model is, read from its config.json in this one place."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanoengine.errors import InvalidConfig, UnknownOption, UnsupportedModel, shown

DTYPES = ("float32", "bfloat16", "float16")
ARCHITECTURES = ("Qwen3ForCausalLM",)
SCHEDULING_POLICIES = ("prefill_first", "mixed")

MAX_INT32 = 2**31 - 1
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
}
"""The most that the layers below can hold, or any machine has."""

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""As for the seed of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every option of the engine; all are keyword arguments of `LLM`. Names follow vLLM and nano-vllm.

    Args:
        model: "demo" (bundled), a local folder, or a hub name such as "Qwen/Qwen3-0.6B".
        tokenizer: a folder or hub name, if the tokenizer is not the model's own.
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's own where the device computes it natively,
            float32 otherwise.
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
        block_size: tokens in one block of the KV cache.
        num_kv_blocks: size of the KV pool in blocks (one more is taken for the null block). None: from memory.
        kv_cache_memory: size of the KV pool in bytes. None: from free memory.
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
        num_threads: threads that compute on the CPU, for torch in this whole process. None: torch's own choice.
        kernels: "native" (compiled for this CPU), "triton" (for NVIDIA GPUs), "torch" (plain torch operations, attention too
            unless it is named), or "auto": those made for the device where they can run.
        attention_backend: "auto" (the fastest that can run), "flash_attn", "torch_varlen", "triton", "native" or "torch".
        enforce_eager: never use CUDA graphs.
        async_scheduling: schedule and launch a step while the one before it runs. None: on a GPU.
        tensor_parallel_size: number of GPUs that share the model; 1 is the only one built.
        seed: seed of the requests that have none of their own: a fresh engine repeats itself.

    Raises:
        InvalidConfig: a value that cannot work, or that is more than the layers below can hold.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    scheduling_policy: str = "prefill_first"
    long_prefill_token_threshold: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
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
        _choice("preemption_mode", self.preemption_mode, ("recompute", "swap", "auto"))
        _choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
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
        if type(self.gpu_memory_utilization) not in (int, float) or not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidConfig(
                f"gpu_memory_utilization is {shown(self.gpu_memory_utilization)}: it must be above 0 and at most 1"
            )
        _count("tensor_parallel_size", self.tensor_parallel_size, MAX_INT32)
        if self.tensor_parallel_size != 1:
            raise InvalidConfig(f"tensor_parallel_size is {shown(self.tensor_parallel_size)}: only 1 is supported")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidConfig(f"seed must be an integer, not {shown(self.seed)}")
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise InvalidConfig(f"seed is {shown(self.seed)}: it must be at least {MIN_SEED} and at most {MAX_SEED}")

    @property
    def uses_lower_tiers(self) -> bool:
        """Whether blocks may go to host memory or disk."""
        return bool(self.preemption_mode != "recompute" or self.kv_host_memory or self.kv_disk_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a model, in one spelling, whichever way its config.json says it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a Hugging Face config.json (schemas of transformers 4 and 5).

        Raises:
            UnsupportedModel: an architecture, rope type or feature that the engine does not compute, or a missing key.
        """
        architectures = config.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        architecture = next((name for name in names if name in ARCHITECTURES), None)
        if architecture is None:
            raise UnsupportedModel(
                f"architectures is {shown(architectures)}: it must be a list, and supported are {', '.join(ARCHITECTURES)}"
            )
        for key, supported in (("use_sliding_window", False), ("quantization_config", None), ("hidden_act", "silu")):
            if config.get(key, supported) not in (supported, None):
                raise UnsupportedModel(f"{key} is {shown(config[key])}: only {supported!r} is supported")

        stated = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype = stated.removeprefix("torch.") if isinstance(stated, str) else None
        if dtype not in DTYPES:
            raise UnsupportedModel(f"the checkpoint's dtype is {shown(stated)}: supported are {', '.join(DTYPES)}")

        self = cls(
            architecture=architecture,
            vocab_size=_required(config, "vocab_size"),
            hidden_size=_required(config, "hidden_size"),
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers", MAX_LAYERS),
            num_heads=_required(config, "num_attention_heads"),
            num_kv_heads=_required(config, "num_key_value_heads"),
            head_dim=_required(config, "head_dim")
            if config.get("head_dim") is not None
            else 128,  # Qwen3's own default
            max_position_embeddings=_required(config, "max_position_embeddings", MAX_POSITIONS),
            rms_norm_eps=_positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            dtype=dtype,
        )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads is {self.num_heads}: it must be a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}: rotary embeddings need an even one")
        if (total := self.num_parameters()) > MAX_PARAMETERS:
            raise UnsupportedModel(
                f"the sizes in the model's config.json make {total} weights: they must be at most {MAX_PARAMETERS}"
            )
        return self

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def num_parameters(self) -> int:
        """Number of weights, from the shapes alone."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = (heads + self.num_heads) * self.head_dim * self.hidden_size + 2 * self.head_dim
        if self.attention_bias:
            attention += heads * self.head_dim + self.hidden_size
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary angles: transformers 5 nests it in `rope_parameters`, transformers 4 keeps it on top."""
    key = (
        "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    )  # the one instead of the other, as transformers
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise UnsupportedModel(f"{key} is {shown(rope)}: it must be a table with rope_type and rope_theta")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModel(f"{key} has a table for each of {shown(list(rope))}: one for all layers is supported")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UnsupportedModel(f"rope_type is {shown(rope_type)}: supported is 'default'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor is {shown(rope['partial_rotary_factor'])}: only 1.0 is supported"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    return _positive_number("rope_theta", theta)


def _positive_number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UnsupportedModel(f"{key} is {shown(value)} in the model's config.json: it must be a positive number")
    return float(value)


def _required(config: Mapping[str, Any], key: str, most: int = MAX_INT32) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key} is {shown(value)} in the model's config.json: it must be a positive integer")
    if value > most:
        raise UnsupportedModel(f"{key} is {shown(value)} in the model's config.json: it must be at most {most}")
    return value


def _count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConfig(f"{name} is {shown(value)}: it must be a positive integer")
    if value > most:
        raise InvalidConfig(f"{name} is {shown(value)}: it must be at most {most}; lower it")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidConfig(f"{name} is {shown(value)}: it must be one of {', '.join(choices)}")
