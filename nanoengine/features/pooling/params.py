"""PoolingParams: the parameters of an embedding request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.core.options import option
from nanoengine.core.sampling_params import CoreSamplingParams

POOLINGS = ("last", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams(CoreSamplingParams):
    """How the hidden states of a prompt become one vector. For the scheduler it is a request for one token, which is dropped.

    Args:
        pooling: "last": the hidden state of the last token; "mean": the mean of the hidden states of all tokens. None: the
            default of the model (files.py).
        normalize: divide the vector by its length. None: the default of the model.
        dimensions: cut the vector to so many numbers, before it is normalized. None: all.

    Raises:
        InvalidSamplingParams: a value outside its range.
    """

    pooling: str | None = option(None, choices=POOLINGS)
    normalize: bool | None = None
    dimensions: int | None = option(None)
    # Fixed values:
    n: int = field(default=1, init=False)
    temperature: float = field(default=0.0, init=False)
    max_tokens: int | None = field(default=1, init=False)
    ignore_eos: bool = field(default=True, init=False)

    def of_model(self, pooling: str | None, normalize: bool, hidden_size: int) -> PoolingParams:
        """These parameters with the defaults of a model instead of None. `pooling`: None if the model needs an unsupported kind.

        Raises:
            InvalidSamplingParams: more dimensions than the model has, or no way to pool.
        """
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidSamplingParams(
                "dimensions",
                f" is {self.dimensions}, but the embeddings of this model have {hidden_size}: ask for fewer",
            )
        if (kind := self.pooling or pooling) is None:
            raise InvalidSamplingParams(
                f"the model's own files ask for a pooling that is not supported: set pooling to {' or '.join(POOLINGS)}"
            )
        is_normalized = normalize if self.normalize is None else self.normalize
        dimensions = self.dimensions or hidden_size
        return dataclasses.replace(self, pooling=kind, normalize=is_normalized, dimensions=dimensions)
