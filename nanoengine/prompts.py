"""Prompts and sampling parameters as callers give them: one, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, shown
from nanoengine.core.llm import Prompt as PlainPrompt
from nanoengine.core.sampling_params import CoreSamplingParams

Prompt = PlainPrompt | Mapping[str, Any]
"""A string, a list of token ids, or one of them in a table, as vLLM has it: {"prompt": ...} or {"prompt_token_ids": ...}."""


def plain_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
    """Prompts as the engine takes them; raises InvalidPrompt for what is none."""
    if not isinstance(prompts, Sequence | Mapping):
        raise InvalidPrompt(
            "prompts", f" must be a string, a list of token ids or a list of such, not {type(prompts).__name__}"
        )
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [plain_prompt(each) for each in cast("Sequence[Prompt]", [prompts] if is_one else prompts)]


def plain_prompt(prompt: Prompt) -> PlainPrompt:
    if not isinstance(prompt, Mapping):
        return prompt
    keys = [name for name, value in prompt.items() if value is not None]
    if keys not in (["prompt"], ["prompt_token_ids"]):
        raise InvalidPrompt(
            f"a prompt has the keys {shown(keys)}: it must be {{'prompt': ...}} or {{'prompt_token_ids': ...}}"
        )
    return cast(PlainPrompt, prompt[keys[0]])


def params_list(
    params: CoreSamplingParams | Sequence[CoreSamplingParams] | None, count: int
) -> list[CoreSamplingParams | None]:
    if params is None or isinstance(params, CoreSamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidSamplingParams(
            "sampling_params", f" must be SamplingParams or a list of them, not {type(params).__name__}"
        )
    if len(params) != count:
        raise InvalidSamplingParams(
            "sampling_params", f" has {len(params)} entries for {count} prompts: give one, or one for each"
        )
    return list(params)
