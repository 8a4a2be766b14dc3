"""Whether and how long the model thinks: the fields of OpenAI, Anthropic, OpenRouter, vLLM and Qwen as one wish."""

from __future__ import annotations

from nanoengine.serve.server.bodies.protocol import ChatRequest, ReasoningWish, Table, ThinkingWish


def thinking_wish(request: ChatRequest) -> Table:
    """Values for the chat template, by the names that `thinking_values` reads.

    Of them `thinking_budget` is the most tokens of the thought.
    """
    reasoning, thinking = request.reasoning or ReasoningWish(), request.thinking or ThinkingWish()
    budgets = request.thinking_budget, request.thinking_token_budget, thinking.budget_tokens, reasoning.max_tokens
    budget = next((value for value in budgets if value is not None), None)
    budget = None if budget == -1 else budget  # no limit
    effort = reasoning.effort if request.reasoning_effort is None else request.reasoning_effort
    is_on = None if thinking.type is None else thinking.type != "disabled"
    switches = request.enable_thinking, is_on, reasoning.enabled
    wish = {
        "enable_thinking": next((value for value in switches if value is not None), None),
        "reasoning_effort": effort,
        "thinking_budget": budget,
    }
    return {name: value for name, value in wish.items() if value is not None}
