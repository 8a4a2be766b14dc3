"""The wish that a model thinks, or does not, under every name that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCHES = "enable_thinking", "thinking"
EFFORTS = {"none": "low", "minimal": "low"}
"""Efforts that templates do not know: those whose model always thinks know low, medium and high."""


def thinking_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a chat template with the wish in them under all names. What is given by a name stays as it is.

    Args:
        values: `enable_thinking` or `thinking` (whether), `reasoning_effort` ("none": not at all), `thinking_budget` (most
            tokens; 0: not at all), and others.
    """
    effort, budget = values.get("reasoning_effort"), values.get("thinking_budget")
    told = next((own for name in SWITCHES if isinstance(own := values.get(name), bool)), None)
    if told is None and (effort is not None or budget is not None):
        told = effort != "none" and budget != 0
    made = dict(values)
    if isinstance(effort, str):
        made["reasoning_effort"] = EFFORTS.get(effort, effort)
    if told is None:
        return made
    off = {} if told else {"reasoning_effort": "low", "thinking_budget": 0}
    for name, value in {**dict.fromkeys(SWITCHES, told), **off}.items():
        if made.get(name) is None:
            made[name] = value
    return made
