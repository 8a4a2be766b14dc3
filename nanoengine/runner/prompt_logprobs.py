"""Log probabilities of a prompt's own tokens, chunk by chunk. Nothing predicts the first token: it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanoengine.engine.messages import PromptLogprobs
from nanoengine.runner.logprobs import Logprobs, compute_logprobs
from nanoengine.runner.stream import Stream, send_array


@dataclass
class PromptPart:
    """Some tokens of a prompt, one after the other; their log probabilities are on their way to the host."""

    row: int
    start: int  # position of the first of these tokens
    token_ids: Sequence[int]
    count: int
    logprobs: Logprobs

    def read(self) -> PromptLogprobs:
        """The message, when they have reached it."""
        counts = [self.count] * len(self.token_ids)
        return PromptLogprobs(self.row, self.start, self.logprobs.read(self.token_ids, counts))


def compute_prompt_logprobs(
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    token_ids: Sequence[int],
    count: int,
    *,
    row: int,
    start: int,
    stream: Stream,
) -> PromptPart:
    """Log probabilities of some tokens of a prompt, without waiting for the device. All logits at once are never there.

    Args:
        hidden: [n, hidden_size]: of the tokens before these, of which each predicts the next one.
        compute_logits: the logits [m, vocab_size] float32 of m rows of it.
        token_ids: the tokens themselves, n of them, at least one.
        count: how many of the likeliest tokens are wanted beside each.
        row: of the sequence.
        start: position of the first of these tokens, 1 or above.
    """
    assert len(hidden) == len(token_ids) > 0
    own = send_array(np.array(token_ids, dtype=np.int64), stream)
    logprobs = compute_logprobs(lambda part: compute_logits(hidden[part]), own, count)
    return PromptPart(row, start, token_ids, count, logprobs)
