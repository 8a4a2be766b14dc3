"""Facts of a model that cannot be together."""

from __future__ import annotations

import pytest

from nanoengine.model_config import LayerConfig


def test_a_layer_has_a_window_or_chunks_and_not_both() -> None:
    """What a backend would make of both is not defined."""
    assert LayerConfig(rope=None, window=8).chunk is None
    assert LayerConfig(rope=None, chunk=8).window is None
    with pytest.raises(AssertionError):
        LayerConfig(rope=None, window=8, chunk=8)
