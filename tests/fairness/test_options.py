from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.fairness.capability import Fairness
from nanoengine.fairness.options import FairnessOptions


@pytest.mark.parametrize(("value", "num_rules"), [(1, 0), (0.01, 1), (0.5, 1)])
def test_with_a_share_of_1_neither_rule_holds(value: float, num_rules: int) -> None:
    config = EngineConfig.from_options("model", {"max_client_share": value}, (FairnessOptions,))
    startup: Any = SimpleNamespace(config=config, num_rows=4, parts=[])
    Fairness().policy(startup)
    assert len(startup.parts) == num_rules
