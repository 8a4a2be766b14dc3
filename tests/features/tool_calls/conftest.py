"""Grammars of calls, for tokenizers whose marks are text or special tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from nanoengine.core.tokenizer import Tokenizer, read_tokenizer
from nanoengine.features.structured.grammars import Grammars
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, THINK
from nanoengine.features.tool_calls.grammar import call_grammar
from nanoengine.features.tool_calls.tool import choose, read_tools
from nanoengine.models.names import DEMO
from tests.features.structured.demo import EOS, accepts_all
from tests.features.tool_calls.test_parser import BY_NAME

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
Accepts = Callable[..., bool]


@pytest.fixture(scope="module", params=["marks are text", "marks are special tokens"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    fast = read_tokenizer(DEMO).fast
    if request.param != "marks are text":
        marks = {mark for own in BY_NAME.values() for mark in own.delimiters if mark != "functools" and "=" not in mark}
        for mark in sorted({*marks, THINK, END_OF_THOUGHT}):
            fast.add_special_tokens([AddedToken(mark)])
    return Grammars(Tokenizer(fast, "the demo's"), fast.get_vocab_size(with_added_tokens=True), [EOS])


@pytest.fixture
def accepts(grammars: Grammars) -> Accepts:
    """Whether an answer may be said and ended."""

    added = {token.content: number for number, token in grammars.tokenizer.fast.get_added_tokens_decoder().items()}

    def accept(
        name: str,
        text: str,
        choice: Any = "auto",
        max_calls: int | None = None,
        tools: Any = (WEATHER, NOW),
        **options: Any,
    ) -> bool:
        if name == "harmony":
            text = text.removesuffix("<|call|>")  # an end of text of these models
        options = {"thinks": False, "is_thinking": False, **options}
        lark = call_grammar(
            BY_NAME[name], choose(read_tools(tools), choice, parallel=max_calls is None), added.get, **options
        )
        return accepts_all(grammars.matcher(StructuredOutputs(grammar=lark)), grammars.tokenizer, text)

    return accept
