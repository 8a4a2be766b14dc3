"""EmbeddingOutput: the result of an embedding request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoengine.core.sequence import Request
from nanoengine.features import EMBEDDING


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """The embedding of one prompt, and the length of its prefix hit in tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: np.ndarray[Any, Any]  # [dimensions] float32
    num_cached_tokens: int

    @property
    def outputs(self) -> EmbeddingOutput:
        """Itself: vLLM's way to `embedding`."""
        return self

    @staticmethod
    def of(request: Request) -> EmbeddingOutput:
        """The output of a request that has ended without an error."""
        seq = request.sequences[0]
        cached = seq.num_cached_tokens or 0
        return EmbeddingOutput(
            request.request_id, request.prompt, request.prompt_token_ids, seq.state[EMBEDDING], cached
        )
