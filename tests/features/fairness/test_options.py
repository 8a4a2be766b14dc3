from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.features.fairness.capability import Fairness
from nanoengine.features.fairness.options import FairnessOptions


@pytest.mark.parametrize(("value", "num_parts"), [(False, 0), (True, 1)])
def test_shares_can_be_switched_off(value: bool, num_parts: int) -> None:
    config = EngineConfig.from_options("model", {"fair_shares": value}, (FairnessOptions,))
    startup: Any = SimpleNamespace(config=config, num_rows=4, parts=[], blocks=None)
    Fairness().policy(startup)
    assert len(startup.parts) == num_parts
