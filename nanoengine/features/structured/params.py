"""StructuredOutputs: the grammar of the text of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams, shown
from nanoengine.depth import MAX_DEPTH, is_nested_too_deeply
from nanoengine.features.tool_calls.schemas import MAX_CHARS

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The grammar of the text of a request. Names follow vLLM. Exactly one of the first six is set.

    Args:
        json: a JSON schema, as a dict or as text.
        json_object: True: any JSON object.
        regex: an expression that the whole text matches, in the notation of Rust's crate regex.
        choice: strings; the text is one of them.
        grammar: a context-free grammar, in the notation of Lark or of GBNF (llama.cpp).
        structural_tag: free text with tags, each with a schema for its content, as a dict or as JSON text:
            {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}. Behind a trigger, the beginning of a
            tag and its schema must follow.
        disable_any_whitespace: False: JSON may have white space wherever JSON may. True: one space behind each comma and colon.
        whitespace_pattern: an expression for the white space between parts of JSON, instead of these.
        with_thought: the grammar includes a thought before the answer. Otherwise a thought is free.
        until: a function that pickles, and makes one for each completion: that is called with each new piece of the text, and
            returns a reason if the text ends behind it, before the grammar does.

    Raises:
        InvalidSamplingParams: none or several of the first six, or a value that none of them can have.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    disable_any_whitespace: bool = True
    whitespace_pattern: str | None = None
    with_thought: bool = False
    until: Callable[[], Callable[[str], str | None]] | None = field(default=None, compare=False, repr=False)
    kind: str = field(init=False)
    """The name of the field that is set."""
    text: str = field(init=False)
    """Its value: JSON text of a schema, a list of choices or a structural tag; an expression or a grammar as it is."""

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            kinds.remove("json_object")
        if len(kinds) != 1:
            raise InvalidSamplingParams(
                "structured_outputs",
                f" gives {' and '.join(kinds) or 'nothing'}: it must be exactly one of {', '.join(KINDS)}",
            )
        [kind] = kinds
        value = getattr(self, kind)
        if kind == "choice":
            text = _choice_text(value)
        elif kind in ("regex", "grammar"):
            text = _string(kind, value)
        elif kind == "json_object":
            text = '{"type": "object"}'
            if value is not True:
                raise _wrong("json_object", f" must be True or None, not {shown(value)}")
        else:
            text = _table_text(kind, value)
        _check_length(kind, text)
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong("disable_any_whitespace", " must be True or False")
        if self.whitespace_pattern is not None:
            _string("whitespace_pattern", self.whitespace_pattern)
        if self.until is not None and not callable(self.until):
            raise _wrong("until", f" is {shown(self.until)}: it must be a function, which JSON has not")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "text", text)

    @property
    def key(self) -> tuple[str, str, bool, str | None]:
        """A key of the allowed texts."""
        return self.kind, self.text, self.disable_any_whitespace, self.whitespace_pattern


StructuredOutputsParams = StructuredOutputs
"""As vLLM calls it."""


def _wrong(name: str, why: str) -> InvalidSamplingParams:
    return InvalidSamplingParams(f"structured_outputs.{name}", why)


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_CHARS:
        raise _wrong(name, f" has {len(text)} characters: at most {MAX_CHARS} can be")


def _string(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _wrong(name, f" is {shown(value)}: it must be a string of at least one character, without NUL")
    _check_length(name, value)
    return value


def _choice_text(value: object) -> str:
    if not isinstance(value, list | tuple) or not value:
        raise _wrong("choice", f" must be a list of strings, not {shown(value)}")
    return json.dumps([_string("choice", each) for each in value], ensure_ascii=False)


def _table_text(name: str, value: object) -> str:
    """JSON text of a table or of its JSON text: no deeper than `MAX_DEPTH`, and with plain values only."""
    if isinstance(value, str):
        _check_length(name, value)
    try:
        table = json.loads(value) if isinstance(value, str) else value
        if table is True and name == "json":  # as a schema: anything
            table = {}
        if not isinstance(table, Mapping):
            raise _wrong(name, f" must be a JSON table, not {shown(table)}")
        if is_nested_too_deeply(table):
            raise _wrong(name, f" is deeper than {MAX_DEPTH} tables and lists")
        return json.dumps(dict(table), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidSamplingParams):
            raise
        raise _wrong(name, f" is no JSON: {error}") from error
