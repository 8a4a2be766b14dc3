"""What a grammar accepts, token by token, and what no grammar is made of."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from nanoengine.core.tokenizer import read_tokenizer
from nanoengine.errors import InvalidSamplingParams
from nanoengine.models.names import DEMO
from nanoengine.structured import grammars as grammars_module
from nanoengine.structured.constraint import Constraint
from nanoengine.structured.grammars import Grammars
from nanoengine.structured.params import StructuredOutputs

EOS = 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = read_tokenizer(DEMO)
    return Grammars(tokenizer, tokenizer.fast.get_vocab_size(), [EOS])


def accepts(grammars: Grammars, fields: dict[str, Any], text: str) -> bool:
    """Whether a text may be said and ended."""
    tokens = [*grammars.tokenizer.encode(text), EOS]
    return grammars.matcher(StructuredOutputs(**fields)).validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            {"json": PERSON},
            ['{"name": "Zoé \\n", "age": 7}'],
            ['{"name": "a"}', '{"name":"a","age":7}', '{"name": "a", "age": -7}'],
        ),
        ({"json": PERSON, "disable_any_whitespace": False}, ['{"name":"a",\n  "age" : 7}'], ['{"name":"a","age":07}']),
        ({"json": PERSON, "whitespace_pattern": "[ ]?"}, ['{"name":"a", "age":7}'], ['{"name":"a",  "age":7}']),
        ({"json": {"x-guidance": {"lenient": True}, "enum": [1]}}, ["1"], ["2"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[1]", "{"]),
        ({"regex": r"\d{3}-(a|b)"}, ["123-a"], ["12-a", "123-ab"]),
        ({"choice": ["a", "ab", 'say "x"']}, ["a", "ab", 'say "x"'], ["b", "abc", ""]),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}, ["x12"], ["x"]),
        ({"grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["x"]),
        ({"structural_tag": TAG}, ["text", "a <f>12</f> b", "a < b"], ["a <f>x</f>", "a <f>12", "<f"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_texts_are_accepted_or_not(
    grammars: Grammars, fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(grammars, fields, text)] == []
    assert [text for text in wrong if accepts(grammars, fields, text)] == []


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"json": {"type": "objekt"}}, "json: Invalid type: objekt"),
        ({"json": {"not": {"type": "integer"}}}, 'json: Unimplemented keys: ."not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "object", "propertyNames": {"maxLength": 3}}}, "propertyNames"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {"if": {"type": "integer"}, "then": {"minimum": 0}}}, "if"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"$ref": "https://example.com/other.json"}}, "not present"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"grammar": "start: other"}, "grammar: .*unknown name"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"structural_tag": {"structures": [], "triggers": ["<f"]}}, "structural_tag must have lists"),
        ({"structural_tag": TAG | {"triggers": ["<g"]}}, "begins with none of the triggers"),
        ({"structural_tag": {"structures": [{"begin": "<f"}], "triggers": ["<f"]}}, "a structure has"),
    ],
)
def test_what_cannot_be_promised_is_named(grammars: Grammars, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=f"structured_outputs.*{match}"):
        grammars.matcher(StructuredOutputs(**fields))


def test_a_grammar_is_compiled_once_and_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_CACHED", 2)
    tokenizer = read_tokenizer(DEMO)
    own = Grammars(tokenizer, tokenizer.fast.get_vocab_size(), [EOS])
    for text in "ababcbc":
        own.matcher(StructuredOutputs(regex=text))
    assert own.num_compiled == 3


def test_any_thread_may_ask_and_states_are_its_own(grammars: Grammars) -> None:
    outputs, found = StructuredOutputs(json=PERSON), []

    def ask(number: int) -> None:
        own = Constraint(grammars.matcher(outputs))
        text = json.dumps({"name": "n" * number, "age": number})
        for token in grammars.tokenizer.encode(text):
            own.read([token])
        found.append((own.error, own.matcher.is_accepting()))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [("", True)] * 8


def test_what_is_forced_is_what_the_tokenizer_would_write(grammars: Grammars) -> None:
    own = Constraint(grammars.matcher(StructuredOutputs(json=PERSON)))
    beginning = grammars.tokenizer.encode('{"name": "')
    forced = own.forced(99)
    assert forced
    assert forced == beginning[: len(forced)]
    assert own.forced(2) == forced[:2]
    assert own.allowed([*forced, EOS]) == forced
    own.read(forced)
    assert not own.error


def test_a_model_that_thinks_is_free_until_it_has_thought(grammars: Grammars) -> None:
    end = grammars.tokenizer.encode("</think>")
    assert len(end) > 1
    own = Constraint(grammars.matcher(StructuredOutputs(choice=("yes", "no"))), end)
    thought = grammars.tokenizer.encode("Hm. </thin")
    own.read(thought)
    assert not own.is_open
    assert (own.forced(9), own.allowed([5, 6])) == ([], [5, 6])
    own.read([*end[:1], *end])
    assert own.is_open
    assert own.allowed([5]) == []
    own.read([*grammars.tokenizer.encode("yes"), EOS])
    assert not own.error
    assert own.matcher.is_stopped()
