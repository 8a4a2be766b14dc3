"""Capability: hooks of a part of the package in the start-up of an engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nanoengine.core.attention import CoreAttentionBackend
    from nanoengine.core.device import Device
    from nanoengine.core.kernels import CoreKernels
    from nanoengine.core.kv_cache import KVCache
    from nanoengine.core.llm_engine import LLMEngine
    from nanoengine.core.model_config import DenseConfig
    from nanoengine.core.model_runner import ModelRunner
    from nanoengine.core.qwen3 import DenseDecoder
    from nanoengine.core.startup import Startup
    from nanoengine.core.tokenizer import Tokenizer


class Capability:
    """The hooks of a capability in start-up, all optional. A result of None leaves the choice to the next one, or to the core."""

    options: type | None = None
    """A frozen dataclass of its options; `startup.config.of(options)` has the values."""

    def describe(self, startup: Startup) -> tuple[DenseConfig, Tokenizer, Seq[int]] | None:
        """Read the model's sizes, its tokenizer and its end-of-text tokens from its files. No weight is read."""

    def device(self, startup: Startup) -> Device | None:
        """The device of the model, and the limits of this process there."""

    def dtype(self, startup: Startup) -> torch.dtype | None:
        """The dtype that `model` is computed in."""

    def kernels(self, startup: Startup) -> CoreKernels | None:
        """The operations of layers."""

    def backend(self, startup: Startup) -> CoreAttentionBackend | None: ...

    def model(self, startup: Startup) -> DenseDecoder | None:
        """The model, with its weights."""

    def kv_cache(self, startup: Startup, num_blocks: int) -> KVCache | None:
        """A KV pool of `num_blocks` blocks."""

    def groups(self, startup: Startup) -> list[list[int]] | None:
        """The layers of each KV group, for each of `startup.layouts`, which it sets."""

    def before_pool(self, startup: Startup) -> None:
        """Allocate memory beside the KV pool, before its size is computed; add to `block_bytes` and `later_bytes` of startup."""

    def new_runner(self, startup: Startup) -> ModelRunner | None:
        """The model runner, with a pool of `startup.num_blocks`."""

    def runner(self, startup: Startup) -> None:
        """Called with a new `startup.runner`: add parts to it, record its steps."""

    def policy(self, startup: Startup) -> None:
        """Called before the scheduler is made: fill `parts` and `stores`."""

    def new_engine(self, startup: Startup) -> LLMEngine | None:
        """The engine; `startup.new_engine` makes the one of this process."""

    def describe_itself(self, startup: Startup) -> str | None:
        """Its text in the details below the start-up line."""
