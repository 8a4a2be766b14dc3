"""What the options of fairness add to the policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidRequest
from nanoengine.core.seams import PolicyPart
from nanoengine.features.fairness.capability import Fairness
from nanoengine.features.fairness.options import FairnessOptions
from tests.core.toys import make_engine


def parts_of(**options: Any) -> list[PolicyPart]:
    config = EngineConfig.from_options("model", options, (FairnessOptions,))
    startup: Any = SimpleNamespace(config=config, num_rows=4, parts=[], blocks=None)
    Fairness().policy(startup)
    return startup.parts  # type: ignore[no-any-return]


def test_shares_can_be_switched_off() -> None:
    assert (len(parts_of(fair_shares=True)), len(parts_of(fair_shares=False))) == (1, 0)


def test_the_operator_says_how_far_to_the_front_a_request_may_go() -> None:
    engine = make_engine(parts=parts_of(min_priority=-1, fair_shares=False))
    for priority in (-1, 0, 2**62):
        assert engine.make_request([1], priority=priority).priority == priority
    with pytest.raises(InvalidRequest, match=r"priority is -2: at least -1 is allowed \(min_priority\)"):
        engine.make_request([1], priority=-2)
