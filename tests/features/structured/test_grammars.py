"""What a grammar accepts, token by token, and what no grammar is made of."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import AddedToken, models

from nanoengine.core.tokenizer import Tokenizer, read_tokenizer
from nanoengine.errors import InvalidSamplingParams
from nanoengine.features.structured.constraint import Constraint
from nanoengine.features.structured.grammars import LEAST_BYTES, Grammars
from nanoengine.features.structured.mask_filling import GrammarPolicy
from nanoengine.features.structured.params import StructuredOutputs
from nanoengine.features.thought import Thought, ThoughtReader
from nanoengine.models.names import DEMO
from tests.features.structured.demo import EOS, accepts_all, demo_grammars

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}


grammars = pytest.fixture(scope="module")(demo_grammars)


def accepts(grammars: Grammars, fields: dict[str, Any], text: str) -> bool:
    return accepts_all(grammars.matcher(StructuredOutputs(**fields)), grammars.tokenizer, text)


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
        ({"choice": [f"choice {number}" for number in range(3000)]}, ["choice 2999"], ["choice 3000", "choice"]),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}, ["x12"], ["x"]),
        ({"grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["x"]),
        (
            {"grammar": r'root ::= "\u0041\xe9" [\u0020-\u002f\U0001F600]+ "\\u0041"'},
            ["Aé😀-\\u0041"],
            ["Aé-A", "Aée\\u0041", "Aé\\u0041"],
        ),
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
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {"if": {"type": "integer"}, "then": {"minimum": 0}}}, "if"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf constraints are not supported$"),
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


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(9000)} | {"d9000": {"type": "integer"}}
TAGS = [
    {"begin": f"<f{i}>", "schema": {"properties": {f"p{k}": {} for k in range(9)}}, "end": ">"} for i in range(3000)
]


TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "references": ({"json": {"$defs": CHAIN, "$ref": "#/$defs/d0"}}, "json: the grammar .*nested too deeply"),
    "multiples": ({"json": {"type": "integer", "multipleOf": 99_999_999}}, "json: the grammar takes more than 1 s"),
    "itself": ({"json": {"$ref": "#"}}, "json: "),
    "parentheses": ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "grammar: .*recursion"),
    "tags": ({"structural_tag": {"structures": TAGS, "triggers": ["<f"]}}, "structural_tag: .*524288 characters, all"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_takes_too_much_is_refused_and_ends_nothing_else(grammars: Grammars, name: str) -> None:
    fields, match = TOO_MUCH[name]
    with pytest.raises(InvalidSamplingParams, match=f"^structured_outputs.{match}"):
        grammars.matcher(StructuredOutputs(**fields))
    assert accepts(grammars, {"regex": "[0-9]"}, "1")


def test_a_tokenizer_that_cannot_be_used_is_named() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(InvalidSamplingParams, match=r"structured_outputs: .*the tokenizer of words"):
        Grammars(Tokenizer(words, "the tokenizer of words"), 10, [0]).matcher(StructuredOutputs(regex="a"))


@pytest.mark.parametrize("more", [-100, -64, 0, 1, 100])
def test_a_model_may_have_more_or_fewer_tokens_than_its_tokenizer(more: int) -> None:
    tokenizer = read_tokenizer(DEMO)
    known = tokenizer.fast.get_vocab_size()
    own = Grammars(tokenizer, known + more, [EOS])
    part, string = GrammarPolicy(own), Constraint(own.matcher(StructuredOutputs(json={"type": "string"})))
    string.read(tokenizer.encode('"'))
    [bits] = part._fill([(string, ())])
    allowed = set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())
    assert len(bits) * 32 >= known + more
    assert set(tokenizer.encode("ab")) <= allowed
    assert EOS not in allowed, "its text is nothing"
    assert max(allowed) < known, "tokens without text"


def test_what_is_cached_takes_no_more_than_its_share() -> None:
    own = demo_grammars()
    large = [StructuredOutputs(choice=tuple(f"choice {i} {n}" for i in range(500))) for n in range(4)]
    own.matcher(large[0])
    assert own.cache.size >= LEAST_BYTES
    own.cache.most = 2 * own.cache.size + LEAST_BYTES - 1
    for outputs in large:
        own.matcher(outputs)
    assert 0 < own.cache.size <= own.cache.most
    own.matcher(large[-1])
    assert own.num_compiled == 4, "what came last is there"


def test_a_grammar_is_compiled_once_for_a_client_and_many_are_kept() -> None:
    """Another client, or the same with another salt, would learn by the time it takes what was asked for."""
    own = demo_grammars()
    own.cache.most = 3 * LEAST_BYTES
    for text in "ababcbc":
        own.matcher(StructuredOutputs(regex=text), "one")
    assert own.num_compiled == 3
    for number, (client, salt) in enumerate((("two", ""), ("one", "salt"), ("two", "salt")), 4):
        own.matcher(StructuredOutputs(regex="a"), client, salt)
        assert own.num_compiled == number
    own.matcher(StructuredOutputs(regex="a"), "two")
    assert own.num_compiled == 6, "who has most lost its oldest"


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


@pytest.mark.parametrize("mark", ["<tool_call>", "<|mark|>", "[MARK]"])
def test_the_text_of_a_mark_may_have_to_come(mark: str) -> None:
    """llguidance takes some marks for special tokens, which are none of a text's characters."""
    tokenizer = read_tokenizer(DEMO)
    tokenizer.fast.add_tokens([AddedToken(mark)])
    number = tokenizer.fast.token_to_id(mark)
    grammars = Grammars(tokenizer, number + 1, [EOS])
    bits = np.zeros((1, number // 32 + 1), np.int32)
    own = Constraint(grammars.matcher(StructuredOutputs(choice=(f"{mark}{{", f"{mark}["))))
    while not own.matcher.is_accepting():
        fill_next_token_bitmask(own.matcher, bits, 0)
        allowed = [token for token in range(number + 1) if bits[0, token // 32] >> (token % 32) & 1]
        own.read([*own.forced(1), *allowed[:1]][:1])
        assert not own.error
    call = Constraint(grammars.matcher(StructuredOutputs(grammar=f"%llguidance {{}}\nstart: <[{number}]> /a+/")))
    if mark[0] == "<":
        call.read([number, *tokenizer.encode("a")])
        assert not call.error


def test_a_model_that_thinks_is_free_until_it_has_thought(grammars: Grammars) -> None:
    end = grammars.tokenizer.encode("</think>")
    assert len(end) > 1
    reader = ThoughtReader(Thought(end="</think>"), grammars.tokenizer.decode)
    own = Constraint(grammars.matcher(StructuredOutputs(choice=("yes", "no"))), reader)

    def read(tokens: list[int]) -> None:
        reader.read(tokens)
        own.read(tokens)

    read(grammars.tokenizer.encode("Hm. </thin"))
    assert not own.holds
    assert (own.forced(9), own.allowed([5, 6])) == ([], [5, 6])
    assert own.allowed([5, *end, 6]) == [5, *end[:-1]], "the grammar has not said yet what may be behind the end"
    read([*end[:1], *end])
    assert own.holds
    assert own.allowed([5]) == []
    read([*grammars.tokenizer.encode("yes"), EOS])
    assert not own.error
    assert own.matcher.is_stopped()
