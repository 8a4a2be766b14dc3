"""Fields of requests as `SamplingParams`, and prompts that are cut to a length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from nanoengine.errors import shown
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.server.bodies.protocol import ChatRequest, Generation, Prompts, Queued
from nanoengine.serve.server.bodies.structured import structured_outputs
from nanoengine.serve.server.bodies.thinking import thinking_wish
from nanoengine.serve.server.errors import APIError

MANY = 1000
"""Lists with more token ids are checked, and answers with more tokens are encoded, in a thread: it takes a millisecond."""

SHARED = [
    field.name
    for field in fields(SamplingParams)
    if field.name in Generation.__struct_fields__ and field.name not in ("seed", "logit_bias", "structured_outputs")
]
"""Fields that have the same meaning in `SamplingParams`."""


def sampling_params(
    request: Generation, defaults: Mapping[str, Any], *, max_model_len: int, max_n: int
) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        request: the body of the request.
        defaults: the model's values of fields that the request does not have.
        max_model_len: tokens of the longest sequence, where every completion ends.
        max_n: the most completions of one prompt.

    Raises:
        InvalidSamplingParams: a value outside its range.
        APIError: a value outside its range, of a field that has another name in `SamplingParams` or none.
    """
    fields_of_request = {name: getattr(request, name) for name in SHARED} | request.sampling()
    if isinstance(request, ChatRequest):
        fields_of_request["thinking_budget"] = thinking_wish(request).get("thinking_budget")
    values: dict[str, Any] = {name: value for name, value in fields_of_request.items() if value is not None}
    if request.seed is not None and request.seed != -1:  # as vLLM has it, -1 is none
        values["seed"] = request.seed
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias)
    check_range(request.name_of("max_tokens"), values.get("max_tokens"), 1, max_model_len, "max_model_len")
    check_range("min_tokens", request.min_tokens, 0, max_model_len, "max_model_len")
    for field in ("n", "best_of"):
        check_range(field, getattr(request, field), 1, max_n, "max_n")
    if (wanted := structured_outputs(request)) is not None:
        values["structured_outputs"] = wanted
    return SamplingParams(**{"max_tokens": None, **defaults, "logprobs": None, **values})


def check_range(field: str, value: int | None, least: int, most: int, option: str) -> None:
    """Raise an APIError if a number is outside of its range. `option`: the option that sets the limit."""
    if value is not None and not least <= value <= most:
        raise APIError(400, f"{field} is {shown(value)}: this server allows {least} to {most} ({option})", field)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id, between -100 and 100; the keys of JSON are text."""
    wrong = [key for key in biases if not re.fullmatch(r"[0-9]{1,10}", key)]
    if wrong:
        raise APIError(400, f"logit_bias holds the keys {shown(wrong)}: keys must be token ids", "logit_bias")
    return {int(key): max(-100.0, min(bias, 100.0)) for key, bias in biases.items()}


def prompt_list(prompt: Prompts | None, field: str, most: int) -> list[str | list[int]]:
    """The prompts of a field. Raises an APIError if there are more than `most`, or one is empty."""
    if isinstance(prompt, list) and len(prompt) > most and not isinstance(prompt[0], int):
        raise APIError(400, f"{field} has {len(prompt)} prompts: this server allows {most} (max_prompts)", field)
    if prompt is None or prompt == "":
        raise APIError(400, f"{field} is missing or empty: give text or token ids", field)
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if not kinds or int in kinds or [] in prompt:
        message = f"{field} must be text, a list of token ids, or a list of such; none of them empty"
        raise APIError(400, message, field)
    return cast(list[str | list[int]], prompt)


def truncate(token_ids: list[int], request: Queued, max_model_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` of a prompt, or the first ones with truncation_side="right"; -1: as many as fit."""
    limit = request.truncate_prompt_tokens
    if limit is None:
        return token_ids
    check_range("truncate_prompt_tokens", limit, -1, max_model_len, "max_model_len")
    limit = max_model_len - 1 if limit == -1 else limit
    if request.truncation_side == "right":
        return token_ids[:limit]
    return token_ids[len(token_ids) - min(limit, len(token_ids)) :]
