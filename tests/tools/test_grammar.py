"""Answers that a grammar of calls lets a model write: those that the parser of the same format reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from nanoengine.core.tokenizer import Tokenizer, read_tokenizer
from nanoengine.models.names import DEMO
from nanoengine.structured.grammars import Grammars
from nanoengine.structured.params import StructuredOutputs
from nanoengine.tools.formats import END_OF_THOUGHT, THINK
from nanoengine.tools.grammar import call_grammar
from nanoengine.tools.tool import choose, read_tools
from tests.tools.test_parser import BY_NAME, calls_of, read, text_of, written

EOS = 0
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}}
NOW = {"type": "function", "function": {"name": "now"}}
A: tuple[str, Any] = ("weather", {"city": "A"})
EMPTY: tuple[str, Any] = ("now", {})
WRONG = ("weather", {"town": "A"})
Accepts = Callable[..., bool]


@pytest.fixture(scope="module", params=["marks are text", "marks are tokens"])
def grammars(request: pytest.FixtureRequest) -> Grammars:
    fast = read_tokenizer(DEMO).fast
    if request.param == "marks are tokens":
        marks = {mark for own in BY_NAME.values() for mark in own.marks if mark != "functools"}
        fast.add_special_tokens([AddedToken(mark) for mark in sorted({*marks, THINK, END_OF_THOUGHT})])
    return Grammars(Tokenizer(fast, "the demo's"), fast.get_vocab_size(with_added_tokens=True), [EOS])


@pytest.fixture
def accepts(grammars: Grammars) -> Accepts:
    """Whether an answer may be said and ended."""

    def accept(
        name: str,
        text: str,
        choice: Any = "auto",
        most: int | None = None,
        tools: Any = (WEATHER, NOW),
        **options: bool,
    ) -> bool:
        if name == "harmony":
            text = text.removesuffix("<|call|>")  # an end of text of these models
        added = {token.content: number for number, token in grammars.tokenizer.fast.get_added_tokens_decoder().items()}
        options = {"thinks": False, "is_thinking": False, **options}
        lark = call_grammar(
            BY_NAME[name], choose(read_tools(tools), choice, parallel=most is None), added.get, **options
        )
        tokens = [*grammars.tokenizer.encode(text, add_special_tokens=False), EOS]
        return grammars.matcher(StructuredOutputs(grammar=lark)).validate_tokens(tokens) == len(tokens)

    return accept


def spelled(name: str, *calls: tuple[str, Any]) -> str:
    """As models write them, to the character: in front of a list there is no space."""
    return (
        written(name, *calls).replace("<|tool_call|> ", "<|tool_call|>").replace("}\n{", "}; {").replace("]\n[", "][")
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_a_call_may_be_forced(accepts: Accepts, name: str) -> None:
    one = spelled(name, A)
    assert accepts(name, one, "required")
    assert accepts(name, spelled(name, EMPTY), "required")
    assert not accepts(name, spelled(name, WRONG), "required")
    assert not accepts(name, one[:-1] if name != "harmony" else one[:-10], "required")
    named = {"type": "function", "function": {"name": "now"}}
    assert accepts(name, spelled(name, EMPTY), named)
    assert not accepts(name, one, named)
    for text in ("", "Hello", "Hello " + one):
        assert not accepts(name, text, "required")
    if name != "harmony":
        assert accepts(name, spelled(name, A, EMPTY, A), "required")
        assert not accepts(name, spelled(name, A, EMPTY), "required", most=1)
        assert accepts(name, one, "required", most=1)


@pytest.mark.parametrize("name", BY_NAME)
def test_otherwise_text_may_be_and_calls_are_right(accepts: Accepts, name: str) -> None:
    text = "Hello {you}, <b>.\n"
    if name == "harmony":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    assert accepts(name, text)
    assert accepts(name, spelled(name, A))
    assert not accepts(name, spelled(name, WRONG))
    if name not in ("harmony", "llama3", "json"):
        assert accepts(name, text + spelled(name, A) + text)
        assert accepts(name, spelled(name, A), most=1)
        assert not accepts(name, text + spelled(name, WRONG))


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"harmony"}))
def test_thoughts_are_free(accepts: Accepts, name: str) -> None:
    call = spelled(name, A)
    assert accepts(name, f"<think>\nHm {{.\n</think>\n\n{call}", "required", thinks=True)
    assert accepts(name, call, "required", thinks=True)
    assert not accepts(name, f"Hm.</think>{call}", "required", thinks=True)
    assert accepts(name, f"Hm.\n</think>{call}", "required", is_thinking=True)
    assert not accepts(name, call, "required", is_thinking=True)
    assert not accepts(name, "<think>Hm.</think>Hello", "required", thinks=True)
    assert accepts(name, "<think>Hm.</think>Hello", thinks=True)


def test_thoughts_of_harmony_are_free(accepts: Accepts) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert accepts("harmony", thought + spelled("harmony", A), "required")
    assert not accepts("harmony", thought + "<|channel|>final<|message|>Yes.", "required")


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_accepted_is_read(accepts: Accepts, name: str) -> None:
    text = spelled(name, A)
    assert accepts(name, text)
    assert (calls_of(read(name, text)), text_of(read(name, text))) == ([A], "")


def test_a_tool_that_is_not_strict_takes_any_object_unless_it_is_forced(accepts: Accepts) -> None:
    loose = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    assert accepts("hermes", spelled("hermes", WRONG), tools=loose)
    assert not accepts("hermes", spelled("hermes", WRONG), "required", tools=loose)
    assert accepts("hermes", spelled("hermes", A), "required", tools=loose)
