"""What clients are told of exceptions."""

from __future__ import annotations

import pytest

from nanoengine.errors import (
    EngineDead,
    InvalidPrompt,
    InvalidSamplingParams,
    NotFiniteLogits,
    NoTokenLeft,
    StepFailed,
)
from nanoengine.server.errors import problem_of

FAILED = StepFailed("the request failed: allowed_token_ids leave nothing", [])
FAILED.__cause__ = NoTokenLeft("allowed_token_ids leave nothing")  # by what the request forbids: its own fault


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidSamplingParams("top_p is 2: it must be at most 1"), 400, "top_p"),
        (InvalidPrompt("the prompt is empty"), 400, "prompt"),
        (InvalidPrompt("a chat message must have a role"), 400, None),
        (EngineDead("the engine died"), 503, None),
        (NotFiniteLogits("NaN"), 500, None),
        (ZeroDivisionError("secret"), 500, None),
        (FAILED, 400, "allowed_token_ids"),
        (StepFailed("the request failed: NaN", []), 500, None),
    ],
)
def test_whose_fault_it_is_says_the_status(error: Exception, status: int, param: str | None) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.param) == (status, param)
    assert "secret" not in problem.message
