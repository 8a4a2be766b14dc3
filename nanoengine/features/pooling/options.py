"""Options of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.options import option
from nanoengine.features.pooling.params import POOLINGS
from nanoengine.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions(Options):
    """Options of embeddings; all are keyword arguments of `LLM`.

    Args:
        pooling: tokens of the embedding of a prompt: "last" or "mean". None: the default of the model's files, or "last".

    Raises:
        InvalidConfig: a value that cannot work.
    """

    pooling: str | None = option(None, choices=POOLINGS)
