"""Calls as Python writes them: their arguments are what Python makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import FAST
from tests.features.tool_calls.test_json_text import VALUES
from tests.features.tool_calls.test_parser import calls_of, read, text_of

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
KEYS = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)


def in_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


@FAST
@given(st.lists(st.tuples(st.sampled_from(["weather", "now"]), ARGUMENTS), min_size=1, max_size=3))
def test_what_python_writes_is_read(calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = f"I look.{BEGIN}[{', '.join(in_python(*own) for own in calls)}]{END}Told."
    whole = read("lfm2", text)
    assert read("lfm2", *text) == whole
    assert calls_of(whole) == calls
    assert text_of(whole) == "I look.Told."


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("now()", {}),
        ("now( a = 1 , b= 'x' )", {"a": 1, "b": "x"}),
        ("""now(a="it's \\"so\\"", b='say "hi"', c='it\\'s')""", {"a": 'it\'s "so"', "b": 'say "hi"', "c": "it's"}),
        ("now(a=true, b=null, c=[False, None], d={'e': -1.5e3, 'f': 1e999})", {"a": True, "b": None, "c": [False, None]}
         | {"d": {"e": -1500.0, "f": float("inf")}}),
        ("now(a='\\x41\\u00e9\\n\\d\\\n.', b=\"</x>]<|tool_call_end|>\")", {"a": "Aé\n\\d.", "b": f"</x>]{END}"}),
        ("now(a='line\nbreak True, b(c=1)')", {"a": "line\nbreak True, b(c=1)"}),
    ],
)  # fmt: skip
def test_a_call_is_read_as_it_is_meant(call: str, arguments: dict[str, Any]) -> None:
    text = f"{BEGIN}[{call}]{END}"
    assert calls_of(read("lfm2", text)) == [("now", arguments)]
    assert calls_of(read("lfm2", *text)) == [("now", arguments)]


@pytest.mark.parametrize(
    "call",
    ["now('Rome')", "now(a=now())", "now(a=b)", "now(a=1", "now(a=1))", "now", "sudo(a=1)", "now(a=1) now()", "now(a=1j)", ""],
)  # fmt: skip
def test_what_is_no_call_is_text(call: str) -> None:
    text = f"{BEGIN}[{call}]{END}"
    assert (text_of(read("lfm2", text)), calls_of(read("lfm2", text))) == (text, [])
