"""What clients are told of exceptions."""

from __future__ import annotations

import json

import pytest

from nanoengine.errors import (
    EngineDead,
    InvalidPrompt,
    InvalidSamplingParams,
    NotFiniteLogits,
    NoTokenLeft,
    StepFailed,
)
from nanoengine.server.errors import Problem, problem_of


def test_a_problem_has_openais_shape() -> None:
    told = json.loads(Problem(400, "x is 3: it must be 2", "x").body())
    assert told == {"error": {"message": "x is 3: it must be 2", "type": "BadRequestError", "param": "x", "code": 400}}


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
