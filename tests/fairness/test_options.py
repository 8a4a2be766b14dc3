from __future__ import annotations

from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.fairness.options import FairnessOptions


@pytest.mark.parametrize("value", [0.0, 1.1, -0.5, float("nan"), "0.5", True, None])
def test_a_share_is_above_0_and_at_most_1(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="max_client_share"):
        EngineConfig.from_options("model", {"max_client_share": value}, (FairnessOptions,))


@pytest.mark.parametrize("value", [1, 0.01, 0.5])
def test_the_share_is_an_option_of_the_engine(value: float) -> None:
    config = EngineConfig.from_options("model", {"max_client_share": value}, (FairnessOptions,))
    assert config.of(FairnessOptions).max_client_share == value
