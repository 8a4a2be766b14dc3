"""Grammars for the tokenizer of the bundled model."""

from __future__ import annotations

from llguidance import LLMatcher

from nanoengine.core.tokenizer import Tokenizer, read_tokenizer
from nanoengine.features.structured.grammars import Grammars
from nanoengine.models.names import DEMO

EOS = 0


def demo_grammars() -> Grammars:
    tokenizer = read_tokenizer(DEMO)
    return Grammars(tokenizer, tokenizer.fast.get_vocab_size(), [EOS])


def accepts_all(matcher: LLMatcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text may be said and ended."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return bool(matcher.validate_tokens(tokens) == len(tokens))
