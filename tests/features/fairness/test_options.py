from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidConfig
from nanoengine.features.fairness.capability import Fairness
from nanoengine.features.fairness.options import FairnessOptions


@pytest.mark.parametrize(("value", "num_parts"), [(False, 0), (True, 1)])
def test_shares_can_be_switched_off(value: bool, num_parts: int) -> None:
    config = EngineConfig.from_options("model", {"fair_shares": value}, (FairnessOptions,))
    startup: Any = SimpleNamespace(config=config, num_rows=4, parts=[], blocks=None)
    Fairness().policy(startup)
    assert len(startup.parts) == num_parts


def test_fair_shares_are_on_or_off() -> None:
    with pytest.raises(InvalidConfig, match=r"fair_shares is 0\.5: it must be True or False"):
        FairnessOptions(fair_shares=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, 1.0, "0", 2**63])
def test_a_least_priority_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"min_priority is .*: it must be an integer from"):
        FairnessOptions(min_priority=value)
