"""Options of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.errors import InvalidConfig, shown
from nanoengine.core.options import check, option

NGRAM, MODEL = "ngram", "model"
MAX_DRAFTS = 15
"""Attention verifies 16 tokens of a sequence at once: its last token, and these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options of speculation; all are keyword arguments of `LLM`.

    Args:
        speculation: verify several drafts in one step, which changes no token: "ngram" (tokens behind an earlier occurrence of
            the last ones in the request), or "model:" and a model with the same tokenizer, of any kind that `model` may be.
            None: one token a step.
        num_drafts: most drafts of a sequence; fewer, where drafts were rejected or many sequences run.

    Raises:
        InvalidConfig: a value that cannot work.
    """

    speculation: str | None = None
    num_drafts: int = option(MAX_DRAFTS, high=MAX_DRAFTS)

    def __post_init__(self) -> None:
        check(self)
        name = self.speculation
        if name not in (None, NGRAM) and self.draft_model is None:
            raise InvalidConfig(f"speculation is {shown(name)}: it must be 'ngram', 'model:' and a model, or None")

    @property
    def draft_model(self) -> str | None:
        """The name of the draft model, if there is one."""
        kind, _, name = (self.speculation or "").partition(":")
        return name if kind == MODEL and name else None
