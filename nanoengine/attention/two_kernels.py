"""A batch of decodes and chunks by two kernels, one for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from nanoengine.attention.backend import AttentionMetadata, AttentionSpec, Runs


class TwoKernels(ABC):
    """The part of a backend that computes: `attend`, made of `decode` and `prefill`, each called once at most.

    Queries and results of either are [num_tokens, num_heads, head_dim].
    """

    features: frozenset[str] = frozenset()
    reads_shared_once = False

    @abstractmethod
    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """Attention of runs of a few tokens each, most often one; each token over the tokens up to itself. A padding row may get
        anything.
        """

    @abstractmethod
    def prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, runs: Runs, spec: AttentionSpec, sinks: Tensor | None
    ) -> Tensor:
        """Attention of runs of any length, each token over the tokens up to itself."""

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        decodes, chunks = metadata.decodes, metadata.chunks
        if decodes is None:
            assert chunks is not None, "a step without tokens"
            return self.prefill(q, k_cache, v_cache, chunks, spec, sinks)
        if chunks is None:
            return self.decode(q, k_cache, v_cache, decodes, spec, sinks)
        count = metadata.num_decode_tokens
        decoded = self.decode(q[:count], k_cache, v_cache, decodes, spec, sinks)
        return torch.cat((decoded, self.prefill(q[count:], k_cache, v_cache, chunks, spec, sinks)))
