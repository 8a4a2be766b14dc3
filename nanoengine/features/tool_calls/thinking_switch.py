"""The thinking switch of a chat template under each of its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCHES = "enable_thinking", "thinking"
EFFORTS = {"none": "low", "minimal": "low"}
"""Efforts without a template: templates of models that always think have low, medium and high."""


def thinking_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a chat template with the switch under all names; stated values stay.

    Args:
        values: `enable_thinking` or `thinking` (whether), `reasoning_effort` ("none": not at all), `thinking_budget` (limit of
            tokens; 0: not at all), and others.
    """
    effort, budget = values.get("reasoning_effort"), values.get("thinking_budget")
    is_on = next((value for name in SWITCHES if isinstance(value := values.get(name), bool)), None)
    if is_on is None and (effort is not None or budget is not None):
        is_on = effort != "none" and budget != 0
    result = dict(values)
    if isinstance(effort, str):
        result["reasoning_effort"] = EFFORTS.get(effort, effort)
    if is_on is None:
        return result
    off = {} if is_on else {"reasoning_effort": "low", "thinking_budget": 0}
    for name, value in {**dict.fromkeys(SWITCHES, is_on), **off}.items():
        if result.get(name) is None:
            result[name] = value
    return result
