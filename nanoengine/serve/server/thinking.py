"""Whether and how long the model thinks: the fields of OpenAI, Anthropic, OpenRouter, vLLM and Qwen as one wish."""

from __future__ import annotations

from typing import Any

from nanoengine.serve.server.errors import Problem
from nanoengine.serve.server.protocol import ChatRequest, Table

TYPES = {"enabled": True, "adaptive": True, "disabled": False}


def thinking_wish(request: ChatRequest) -> tuple[Table, int | None]:
    """Values for the chat template, by the names that `thinking_values` reads, and the most tokens of the thought.

    Raises:
        Problem: a field with a value that it cannot have.
    """
    reasoning, thinking = request.reasoning or {}, request.thinking or {}
    kind = thinking.get("type")
    if kind is not None and kind not in TYPES:
        raise Problem(400, f"thinking.type is {str(kind)[:80]!r}: it must be {', '.join(TYPES)}", "thinking")
    budgets = {
        "thinking_budget": request.thinking_budget,
        "thinking_token_budget": request.thinking_token_budget,
        "thinking.budget_tokens": thinking.get("budget_tokens"),
        "reasoning.max_tokens": reasoning.get("max_tokens"),
    }
    budget = next((_budget(name, value) for name, value in budgets.items() if value is not None), None)
    effort = reasoning.get("effort") if request.reasoning_effort is None else request.reasoning_effort
    if effort is not None and not isinstance(effort, str):
        raise Problem(400, "reasoning.effort must be a text, such as 'low'", "reasoning")
    switches = request.enable_thinking, TYPES.get(kind or ""), reasoning.get("enabled")
    wish = {
        "enable_thinking": next((own for own in switches if isinstance(own, bool)), None),
        "reasoning_effort": effort,
        "thinking_budget": budget,
    }
    return {name: value for name, value in wish.items() if value is not None}, budget


def _budget(name: str, value: Any) -> int | None:
    """A number of tokens; -1 is no limit."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**31:
        raise Problem(400, f"{name} must be a number of tokens, or -1 for no limit", name.partition(".")[0])
    return None if value == -1 else value
