"""The most bytes that an answer takes while it is made, computed from the request before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.core.sequence import Request

TOKEN = 16
"""Bytes of a new token: its id and its text."""

PROMPT_TOKEN = 8
"""Bytes of a token of the prompt, in each completion."""

TOP = 400
"""Bytes of one log probability of a new token, as an object and as JSON."""

PROMPT_TOP = 700
"""Bytes of one log probability of a token of the prompt, with its rank and text."""


def answer_bytes(requests: Sequence[Request], max_model_len: int, *, repeated: int = 0, num_copies: int = 1) -> int:
    """The most bytes of the answer to some requests.

    Args:
        requests: one for each prompt.
        max_model_len: tokens of the longest sequence: completions without a limit end there.
        repeated: the number of characters of the request that the answer repeats.
        num_copies: how often the answer has the log probabilities of a prompt.
    """
    size = 4 * repeated  # as text, escaped in JSON, and in buffers
    for request in requests:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        num_new = min(params.max_tokens or max_model_len, max_model_len - num_prompt)
        logprobs = getattr(params, "logprobs", None)
        of_prompt = getattr(params, "prompt_logprobs", None)
        size += params.num_sequences * num_new * (TOKEN + (0 if logprobs is None else TOP * (logprobs + 1)))
        size += params.num_sequences * num_prompt * PROMPT_TOKEN
        if of_prompt is not None:
            size += num_prompt * PROMPT_TOP * (of_prompt + 1) * num_copies
    return size
