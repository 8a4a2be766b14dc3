from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.fairness.capability import Fairness
from nanoengine.fairness.options import FairnessOptions


@pytest.mark.parametrize(("value", "num_rules"), [(1, 0), (0.01, 1), (0.5, 1)])
def test_with_a_share_of_1_neither_rule_holds(value: float, num_rules: int) -> None:
    config = EngineConfig.from_options("model", {"max_client_share": value}, (FairnessOptions,))
    startup: Any = SimpleNamespace(config=config, num_rows=4, parts=[], blocks=None)
    Fairness().policy(startup)
    assert len(startup.parts) == num_rules


@pytest.mark.parametrize("value", [True, 1.0, "0", 2**63])
def test_a_least_priority_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"min_priority is .*64 bits"):
        FairnessOptions(min_priority=value)
