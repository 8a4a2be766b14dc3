"""PoolingParams and PoolingOptions."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine import PoolingParams
from nanoengine.errors import InvalidConfig, InvalidSamplingParams
from nanoengine.features.pooling.options import PoolingOptions
from nanoengine.features.pooling.pooler import vector


def test_bad_values_are_named() -> None:
    """Those of other types: tests/test_any_value.py."""
    with pytest.raises(InvalidSamplingParams, match="pooling is 'cls': it must be one of last, mean"):
        PoolingParams(pooling="cls")
    with pytest.raises(InvalidSamplingParams, match="dimensions is 0"):
        PoolingParams(dimensions=0)
    with pytest.raises(InvalidConfig, match="pooling is 'cls'"):
        PoolingOptions(pooling="cls")


def test_what_nobody_said_is_the_models() -> None:
    own = PoolingParams().of_model("mean", False, 8)
    assert (own.pooling, own.normalize, own.dimensions) == ("mean", False, 8)
    own = PoolingParams(pooling="last", normalize=True, dimensions=3).of_model(None, False, 8)
    assert (own.pooling, own.normalize, own.dimensions) == ("last", True, 3)


def test_one_token_is_sampled_and_none_ends_it() -> None:
    own = PoolingParams()
    assert (own.max_tokens, own.n, own.temperature, own.ignore_eos) == (1, 1, 0.0, True)
    with pytest.raises(TypeError):
        PoolingParams(max_tokens=2)  # type: ignore[call-arg]


def test_a_vector_is_cut_before_its_length_is_taken() -> None:
    pooled = np.array([3.0, 4.0, 12.0])
    assert vector(pooled, PoolingParams(dimensions=2, normalize=True)).tolist() == [np.float32(0.6), np.float32(0.8)]
    assert vector(pooled, PoolingParams(normalize=False)).tolist() == [3.0, 4.0, 12.0]
    assert vector(np.zeros(3), PoolingParams(normalize=True)).tolist() == [0.0, 0.0, 0.0]
