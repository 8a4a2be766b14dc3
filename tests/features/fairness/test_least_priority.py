"""How far to the front of all others a request may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidRequest
from nanoengine.features.fairness.capability import Fairness
from nanoengine.features.fairness.options import FairnessOptions
from tests.core.toys import make_engine


def test_the_operator_says_how_far_to_the_front_a_request_may_go() -> None:
    config = EngineConfig.from_options("model", {"min_priority": -1, "fair_shares": False}, (FairnessOptions,))
    startup: Any = SimpleNamespace(config=config, num_rows=4, parts=[])
    Fairness().policy(startup)
    engine = make_engine(parts=startup.parts)
    for priority in (-1, 0, 2**62):
        assert engine.make_request([1], priority=priority).priority == priority
    with pytest.raises(InvalidRequest, match=r"priority is -2: at least -1 is allowed \(min_priority\)"):
        engine.make_request([1], priority=-2)
