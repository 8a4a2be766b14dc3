"""An answer that is one call and nothing else is a call, in every format and however it is cut; any other stays as it is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.features.tool_calls.answer_parser import Text, answer_parser
from tests.drawn import FAST
from tests.features.tool_calls.test_parser import BY_NAME, CALL, NAMES, NOW, calls_of, read, text_of

OPENED = ["", "```", "```json\n", "``` json ", "```tool_call\n", "\n\n```JSON\n", "Here: ```json\n", "```python\n"]
OBJECTS = [
    *(CALL, CALL.replace("arguments", "parameters"), '{ "name" : "now",\n "arguments": {} }'),
    *('{"type": "function", "function": ' + CALL + "}", '{"arguments": {"city": "A"}, "name": "weather"}'),
    *(NOW, CALL.replace("weather", "sudo"), CALL.replace("weather", "weather_of"), f"[{CALL}]", CALL + CALL, CALL[:-1]),
    *(CALL.replace("{}", "5").replace('{"city": "A"}', "5"), '{"title": "a"}', '{"a": {"name": "now"}}', "print(1)"),
]
CLOSED = ["", "```", "\n```\n", " ``` ```", "``", "\nDone.", "<|end|>", "```<|end|>\n", f"\n{CALL}\n"]
WHOLE = re.compile(r"(?:(```(?:json|tool_call)?)\s*|)(\{.*\})\s*(```)?(?:<\|end\|>)?\s*", re.DOTALL)


def one_call(text: str) -> Any:
    """The call that all of a text is, by definition."""
    found = WHOLE.fullmatch(text.replace("``` json", "```json").strip())
    try:
        value = json.loads(found[2]) if found is not None and (found[1] is None) == (found[3] is None) else {}
    except ValueError:
        return None
    value = value if "name" in value else value.get("function", {})
    arguments = value.get("arguments", value.get("parameters"))
    return (value["name"], arguments) if value.get("name") in NAMES and isinstance(arguments, dict) else None


@FAST
@given(st.data())
def test_an_answer_that_is_one_call_is_a_call_in_every_format_and_any_other_stays(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(BY_NAME)))
    text = "".join(data.draw(st.sampled_from(own)) for own in (OPENED, OBJECTS, CLOSED))
    thought = data.draw(st.sampled_from(["", "<think>Hm.</think>\n\n"])) if name != "harmony" else ""
    options: dict[str, Any] = {"thinks": True, "dropped": ["<|end|>"]}
    if name == "harmony":
        text = text.replace("<|end|>", "")
    expected = one_call(text)
    events = read(name, thought + text, whole=NAMES, **options)
    if expected is not None and not (name in ("llama3", "json") and "`" not in text):
        assert calls_of(events) == [expected]
        assert text_of(events) == ""
    else:
        assert events == read(name, thought + text, **options)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(thought + text)))))
    ends = [*cuts, len(thought + text)]
    pieces = [(thought + text)[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    assert read(name, *pieces, whole=NAMES, **options) == events
    assert read(name, *(thought + text), whole=NAMES, **options) == events


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ('{"title": "' + "a" * 5000, 4),
        ("```python\n" + "x = 1\n" * 900, 5),
        ('```json\n{"name": "Ann", "age"' + " " * 5000, 21),
        (CALL + "\nSo " + "a" * 5000, len(CALL) + 2),
        (f"```json\n{CALL}\n```\nSo " + "a" * 5000, len(CALL) + 15),
    ],
)
def test_text_is_held_no_longer_than_it_may_be_one_call(text: str, most: int) -> None:
    """And what was held is told in one piece."""
    parser = answer_parser(BY_NAME["hermes"], NAMES, whole=NAMES)
    told = ""
    for count, character in enumerate(text, start=1):
        told += "".join(own.text for own in parser.push(character) if isinstance(own, Text))
        if count > most:
            assert told.rstrip() == text[:count].rstrip(), count
    assert text_of([*parser.finish()]) == text[len(told) :]
