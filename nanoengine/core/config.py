"""EngineConfig: the options of the engine. Each capability adds further options (`Options`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from nanoengine.core.errors import InvalidConfig, UnknownOption, did_you_mean, shown
from nanoengine.core.options import MAX_INT32, check, option

POLICIES = ("prefill_first", "mixed")
DTYPES = ("float32", "bfloat16", "float16")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the core; all are keyword arguments of `LLM`. Names follow vLLM and nano-vllm.

    Args:
        model: a folder with config.json, tokenizer.json and safetensors.
        dtype: "float32", "bfloat16", "float16", or "auto": as the checkpoint where the device computes it natively, float32
            otherwise.
        device: "cpu", "cuda", "cuda:1", or "auto": cuda if there is one.
        max_model_len: longest sequence (prompt and output) in tokens. None: the limit of the model, lowered to the KV pool.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of one step; longer prompts are computed in chunks.
        scheduling_policy: "prefill_first": prompts alone, while any can start; "mixed": every running sequence gets its next
            token, and prompts get the rest of the step.
        long_prefill_token_threshold: most tokens of one prompt in one step. None: max_num_batched_tokens.
        block_size: tokens of a block of the KV cache. None: 256 where flash-attn computes attention, 16 elsewhere.
        num_kv_blocks: size of the KV pool in blocks. None: from memory.
        kv_cache_memory: size of the KV pool in bytes, or as "2GiB". None: from free memory.
        gpu_memory_utilization: fraction of the GPU's memory that the engine may fill, weights included.
        enable_prefix_caching: reuse the K/V of equal prefixes. False: only within one request.
        num_threads: threads that compute on the CPU. None: torch's default, within the quotas of control groups.
        attention_backend: by name, or "auto": the fastest that can run.
        async_scheduling: schedule and launch a step while the one before it runs. None: on a GPU.
        seed: of requests without one.
        options: of capabilities, by type.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    model: str
    dtype: str = option("auto", choices=("auto", *DTYPES))
    device: str = "auto"
    max_model_len: int | None = option(None, high=2**24)
    max_num_seqs: int = option(256, high=2**20)
    max_num_batched_tokens: int = option(8192, high=2**20)
    scheduling_policy: str = option("prefill_first", choices=POLICIES)
    long_prefill_token_threshold: int | None = option(None, high=2**20)
    block_size: int | None = option(None, high=2**20)
    num_kv_blocks: int | None = option(None, high=MAX_INT32 - 1)
    kv_cache_memory: int | None = option(None, high=2**50, unit="bytes")
    gpu_memory_utilization: float = option(0.9, 0, 1, above=True)
    enable_prefix_caching: bool = True
    num_threads: int | None = option(None, high=1024)
    attention_backend: str = "auto"
    async_scheduling: bool | None = None
    seed: int = option(0, -(2**63), 2**64 - 1)
    options: Mapping[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise InvalidConfig("num_kv_blocks and kv_cache_memory both size the KV pool: give one of them")

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any], types: tuple[type, ...] = ()) -> EngineConfig:
        """A config from keyword arguments.

        Args:
            types: of capabilities' options: dataclasses whose fields are option names.

        Raises:
            UnknownOption: an option that no type declares; the message suggests the nearest name.
        """
        owners = {each.name: kind for kind in (cls, *types) for each in fields(kind) if each.name != "options"}
        for name in options:
            if name not in owners:
                raise UnknownOption(f"unknown option {shown(name)}{did_you_mean(name, owners)}")
        values = {kind: {name: options[name] for name in options if owners[name] is kind} for kind in (cls, *types)}
        return cls(**{"model": model} | values[cls], options={kind: kind(**values[kind]) for kind in types})

    def of(self, kind: type[T]) -> T:
        """The options of a capability."""
        return cast(T, self.options[kind])
