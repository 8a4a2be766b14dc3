"""Grammars that force tool calls in the format of a model, with arguments that satisfy their schemas.

In llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). There a special token is
no character of a text, so a delimiter that is one is written as `<[id]>`. A parser cannot distinguish such a token from the same
text in characters: in free text, both forms of a delimiter are matched.
"""

from __future__ import annotations

import json
from typing import Any

from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, FUNCTION, HARMONY_DELIMITERS, THINK, ToolFormat
from nanoengine.features.tool_calls.rules import FindToken, Rules
from nanoengine.features.tool_calls.schemas import normalized_schema
from nanoengine.features.tool_calls.tool import Choice, Tool
from nanoengine.features.tool_calls.values import Kinds
from nanoengine.features.tool_calls.xml_grammar import xml_call

NO_OBJECT = r'/([^{]|\{+[^{"\s])*/'
"""A text in which no JSON object begins."""


def call_grammar(
    format: ToolFormat, choice: Choice, find: FindToken, *, thinks: bool, is_thinking: bool, schema: Any = None
) -> str:
    """A grammar of answers.

    Args:
        format: of calls.
        choice: of tools. If calls are forced, an answer is thoughts and calls alone. Otherwise it may have text, and behind any
            delimiter of a call a call must follow; its arguments fit the schema if the tool is strict, and are any object if not.
        find: the token id of a delimiter; None if it is not a token.
        thinks, is_thinking: see `AnswerRules`.
        schema: of an answer without calls, if that must be JSON. Where calls are forced, there is no such answer.

    Raises:
        InvalidSamplingParams: a schema that this format cannot enforce.
    """
    rules = Rules(find)
    tools: list[tuple[Tool, Any]] = []
    for tool in choice.tools:
        is_exact = choice.is_forced or tool.is_strict
        tools.append((tool, normalized_schema(tool.parameters, tool.field) if is_exact else {"type": "object"}))
    of_answer = "structured_outputs.json"
    said = "" if schema is None or choice.is_forced else rules.json(normalized_schema(schema, of_answer), of_answer)
    if format.shape == "harmony":
        rules.rules["start"] = _messages(rules, choice, tools, said)
        return rules.text()
    body = _body(rules, format, choice, tools)
    before = _thought(rules, is_thinking) if thinks or is_thinking else ""
    rules.rules["SPACE"] = r"/[ \t\r\n]{1,8}/"
    if choice.is_forced or said or not format.begins:
        rules.rules["call"] = f"{rules.say(*format.begins[:1], format.inner if format.begins else '')} {body}"
        is_one = choice.max_calls == 1 or format.is_list
        between = f"({rules.say(format.between)} | SPACE)" if format.between.strip() else "SPACE?"
        calls = "call" if is_one else f"call ({between} call)*"
        start = f"{calls} SPACE?"  # most models write a line break there, then their end token
        if said:
            start = f"({start} | {said})"
        elif not choice.is_forced:
            rules.rules["NO_OBJECT"] = NO_OBJECT
            start = f"({start} | NO_OBJECT)"
    else:
        rules.rules["call"] = f"{rules.up_to('trigger', *format.begins)} {rules.say(format.inner)} {body}"
        if format.shape == "xml":  # without the delimiter in front
            rules.rules["call"] += f" | {rules.up_to('bare', FUNCTION)} function"
        start = f"call{'?' if choice.max_calls == 1 else '*'} TEXT"
    rules.rules["start"] = f"{before} {start}"
    return rules.text()


def _thought(rules: Rules, is_thinking: bool) -> str:
    """A thought in front of the answer, or the rest of one that the prompt has begun."""
    rest = rules.up_to("rest_of_thought", END_OF_THOUGHT)
    return f"{rest if is_thinking else f'({rules.say(THINK)} {rest})?'} SPACE?"


def _body(rules: Rules, format: ToolFormat, choice: Choice, tools: list[tuple[Tool, Any]]) -> str:
    """The rest of a call behind its start delimiter, with the end delimiter."""
    end = rules.say(format.inner, format.end)
    if format.shape == "xml":
        kinds = Kinds()
        rules.rules["function"] = " | ".join(xml_call(rules, kinds, *pair) for pair in tools)
        return f"{rules.say(FUNCTION)} function {end}"
    if format.shape == "args":
        calls = " | ".join(
            f"{rules.say(tool.name, '[ARGS]')} {rules.json(parameters, tool.field)}" for tool, parameters in tools
        )
        return f"({calls})"
    # Split as llguidance splits JSON, which an answer without calls may be: its lexer matches the longest terminal and never
    # backtracks.
    objects = " | ".join(
        " ".join(map(json.dumps, (json.dumps(tool.name), ", ", f'"{format.arguments}"', ": ")))
        + f" {rules.json(parameters, tool.field)}"
        for tool, parameters in tools
    )
    rules.rules["object"] = f'"{{" "\\"name\\"" ": " ({objects}) "}}"'
    if not format.is_list:
        return f"object {end}"
    several = "" if choice.max_calls == 1 else ' (", " object)*'
    is_sure = choice.is_forced or len(format.begins) == 1  # the end belongs to the first delimiter
    return f'"[" object{several} "]" {end if is_sure or not end else f"({end})?"}'


def _messages(rules: Rules, choice: Choice, tools: list[tuple[Tool, Any]], said: str) -> str:
    """An answer of harmony: thoughts, and then a call or the text for the user. No message holds the head of another."""
    heads = [f"commentary to=functions.{tool.name} " for tool, _ in tools]
    values = [rules.json(parameters, tool.field) for tool, parameters in tools]
    rules.rules["BODY"] = rules.without("TEXT", *HARMONY_DELIMITERS)
    begin, message = rules.say("<|channel|>"), rules.say("<|message|>")
    of_json = rules.say("<|constrain|>", "json", "<|message|>")
    calls = " | ".join(f"{begin} {json.dumps(h)} {of_json} {v}" for h, v in zip(heads, values, strict=True))
    kinds = '"analysis"' if choice.is_forced else '("analysis" | "commentary")'
    rest = f"{rules.up_to('rest_of_message', '<|end|>', text='BODY')} {rules.say('<|start|>', 'assistant')}"
    last = calls if choice.is_forced else f'{calls} | {begin} "final" {message} {said or "BODY"}'
    return f"({begin} {kinds} {message} {rest})* ({last})"
