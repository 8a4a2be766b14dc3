"""PoolingParams: what a request wants that asks for an embedding of its prompt, and for no text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.options import option
from nanoengine.core.sampling_params import CoreSamplingParams

POOLINGS = ("last", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams(CoreSamplingParams):
    """How the hidden states of a prompt become one vector. To the scheduler it is a request for one token, which is dropped.

    Args:
        pooling: "last": what the last layer says of the last token; "mean": the mean of what it says of all of them. None: what
            the model was made for (files.py).
        normalize: divide the vector by its length. None: what the model was made for.
        dimensions: keep so many numbers from the first on, before the length is taken. None: all.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    pooling: str | None = option(None, choices=POOLINGS)
    normalize: bool | None = None
    dimensions: int | None = option(None)
    # What a caller may not change:
    n: int = field(default=1, init=False)
    temperature: float = field(default=0.0, init=False)
    max_tokens: int | None = field(default=1, init=False)
    ignore_eos: bool = field(default=True, init=False)

    def of_model(self, pooling: str | None, normalize: bool, hidden_size: int) -> PoolingParams:
        """These parameters with what a model was made for in place of None; `pooling` is None if it was made for another.

        Raises:
            InvalidSamplingParams: more dimensions than the model has, or no way to pool.
        """
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidSamplingParams(
                "dimensions",
                f" is {self.dimensions}, but the embeddings of this model have {hidden_size}: ask for fewer",
            )
        found = self.pooling or pooling
        if found is None:
            raise InvalidSamplingParams(
                f"the model's own files ask for a pooling that is not supported: set pooling to {' or '.join(POOLINGS)}"
            )
        own = normalize if self.normalize is None else self.normalize
        return dataclasses.replace(self, pooling=found, normalize=own, dimensions=self.dimensions or hidden_size)
