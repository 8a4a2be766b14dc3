"""Capability: what a part of the package adds to an engine while it starts up."""

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
    """The part of a capability in start-up. Every method may be left as it is; None lets the next one, or the core, decide."""

    options: type | None = None
    """A frozen dataclass of its options; `startup.config.of(options)` are the values."""

    def describe(self, startup: Startup) -> tuple[DenseConfig, Tokenizer, Seq[int]] | None:
        """Read the model's sizes, its tokenizer and its end-of-text tokens from its files. No weight is read."""

    def device(self, startup: Startup) -> Device | None:
        """Where the model is computed, and what this process may take there."""

    def dtype(self, startup: Startup) -> torch.dtype | None:
        """The dtype that `model` is computed in."""

    def kernels(self, startup: Startup) -> CoreKernels | None:
        """The operations of layers."""

    def backend(self, startup: Startup) -> CoreAttentionBackend | None: ...

    def model(self, startup: Startup) -> DenseDecoder | None:
        """The model, with its weights."""

    def kv_cache(self, startup: Startup, num_blocks: int) -> KVCache | None:
        """A pool of so many blocks."""

    def groups(self, startup: Startup) -> list[list[int]] | None:
        """The layers of each KV group, for each of `startup.layouts`, which it sets."""

    def before_pool(self, startup: Startup) -> None:
        """The model and its groups are there, and the KV pool is not sized yet: load what takes memory beside them, and add to
        `startup.block_bytes` and `later_bytes`.
        """

    def new_runner(self, startup: Startup) -> ModelRunner | None:
        """What computes steps, with a pool of `startup.num_blocks`."""

    def runner(self, startup: Startup) -> None:
        """`startup.runner` is there: add parts to it, record its steps."""

    def policy(self, startup: Startup) -> None:
        """Everything is there but the policy: fill `parts` and `stores`."""

    def new_engine(self, startup: Startup) -> LLMEngine | None:
        """What takes requests: the policy is complete. It may be made around `startup.new_engine()`."""

    def describe_itself(self, startup: Startup) -> str | None:
        """Its words in the details below the start-up line."""
