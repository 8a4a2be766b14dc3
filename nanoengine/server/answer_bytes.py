"""How many bytes an answer may take, from what a request asks for: known before anything of it is made."""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.core.sequence import Request

TOKEN = 16
"""Of a new token: its id and its text."""

PROMPT_TOKEN = 8
"""Of a token of the prompt, which each completion keeps."""

TOP = 400
"""Of one log probability beside a token, as an object and as JSON."""

PROMPT_TOP = 700
"""Of one beside a token of the prompt, which has its rank and text."""


def answer_bytes(requests: Sequence[Request], max_model_len: int, *, repeated: int = 0, num_copies: int = 1) -> int:
    """The most that the answer to some requests takes while it is made.

    Args:
        requests: one for each prompt.
        max_model_len: where completions end that have no limit of their own.
        repeated: characters that the answer repeats of what it was asked.
        num_copies: how often it has what belongs to a prompt.
    """
    size = 4 * repeated  # as text, escaped in JSON, and on its way
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
