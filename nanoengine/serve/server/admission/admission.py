"""Admission: the limits of what requests may use, and how much of them is in use."""

from __future__ import annotations

from collections import Counter

from nanoengine.serve.server.admission.quota import Quota
from nanoengine.serve.server.config import ServerConfig


class Admission:
    """The quotas of one model.

    Args:
        config: of the server.

    Attributes:
        bodies, answers: in bytes.
        sequences: without a token yet.
        tokens: of these sequences, prompts and completions.
        num_preparing: sequences whose text is being encoded.
        num_rejected: requests that were refused with 503, by reason.
    """

    def __init__(self, config: ServerConfig):
        self.bodies, self.num_preparing, self.num_rejected = quota_of_bodies(config), 0, Counter[str]()
        hint = "ask for fewer tokens, log probabilities or completions"
        self.answers = Quota.of_bytes(config.max_answer_bytes, "max_answer_bytes", "this answer may take {}", hint)
        most = max(1, config.max_waiting)
        self.sequences = Quota.of_positions(most, "max_waiting", "prompts times n are {}", "sequences")
        needs = "this request may take {}, its prompts and max_tokens times n"
        self.tokens = Quota.of_positions(config.max_waiting_tokens, "max_waiting_tokens", needs, "tokens")


def quota_of_bodies(config: ServerConfig) -> Quota:
    """The bytes of the bodies of all requests that are being answered."""
    most = config.max_held_body_bytes
    return Quota.of_bytes(most, "max_held_body_bytes", "this body may take {}", "shorten it")
