"""Grammar: what makes a model call tools, in its own format, with arguments that fit their schemas.

In llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). There a special token is
none of the characters of a text, so a mark that is one is written as `<[id]>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nanoengine.structured.params import JSON_OPTIONS, ONE_SPACE
from nanoengine.tools.formats import END_OF_THOUGHT, THINK, ToolFormat
from nanoengine.tools.tool import Choice, Tool

NO_OBJECT = r'/([^{]|\{+[^{"\s])*/'
"""Text in which no JSON object begins."""

FindToken = Callable[[str], int | None]
"""The id of an added token; None if a text is none."""


class _Grammar:
    def __init__(self, format: ToolFormat, find: FindToken):
        self.format, self.find = format, find
        self.rules = {"TEXT": r"/(.|\n)*/", "SPACE": r"/\s{1,8}/"}

    def text(self) -> str:
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())

    def say(self, *texts: str) -> str:
        """Texts, one behind the other, of which each may be a token."""
        tokens = ((text, self.find(text)) for text in texts if text)
        return " ".join(json.dumps(text) if token is None else f"<[{token}]>" for text, token in tokens)

    def up_to(self, name: str, mark: str) -> str:
        """Any text, and the mark."""
        if self.find(mark) is not None:
            return f"TEXT {self.say(mark)}"
        self.rules[f"{name}[lazy]"] = f"TEXT {json.dumps(mark)}"
        return name

    def thought(self, is_thinking: bool) -> str:
        """What a model may think before it answers, or goes on thinking."""
        rest = self.up_to("rest_of_thought", END_OF_THOUGHT)
        return f"{rest if is_thinking else f'({self.say(THINK)} {rest})?'} SPACE?"

    def calls(self, tools: tuple[Tool, ...], schemas: list[Any], most: int | None) -> str:
        """One call or more, with all that belongs to them."""
        own = self.format
        values = [f"%json {json.dumps(schema)}" for schema in schemas]
        if own.shape == "harmony":
            begin = self.say("<|channel|>")
            head = [
                f"{begin} {json.dumps(f'commentary to=functions.{tool.name} ')}"
                f" {self.say('<|constrain|>', 'json', '<|message|>')} {value}"
                for tool, value in zip(tools, values, strict=True)
            ]
            self.rules["call"] = " | ".join(head)
            return "call"
        if own.shape == "args":
            begin = self.say(own.begins[0])
            named = [f"{self.say(tool.name, '[ARGS]')} {value}" for tool, value in zip(tools, values, strict=True)]
            self.rules["call"] = f"{begin} ({' | '.join(named)})"
        else:
            heads = [json.dumps(json.dumps(tool.name)[1:] + f', "{own.arguments}": ') for tool in tools]
            named = [f"{head} {value}" for head, value in zip(heads, values, strict=True)]
            self.rules["object"] = f'"{{\\"name\\": \\"" ({" | ".join(named)}) "}}"'
            if own.shape == "list":
                several = "" if most == 1 else ' (", " object)*'
                self.rules["call"] = f'{self.say(own.begins[0])} "[" object{several} "]" {self.say(own.end)}'
                return "call"
            begin, end = self.say(*own.begins[:1], own.inner), self.say(own.inner, own.end)
            self.rules["call"] = f"{begin} object {end}"
        return "call" if most == 1 else f"call ({self.say(own.between)} call)*"


def call_grammar(format: ToolFormat, choice: Choice, find: FindToken, *, thinks: bool, is_thinking: bool) -> str:
    """A grammar of answers.

    Args:
        format: how calls are written.
        choice: of tools. Forced: there is nothing but calls, behind what the model thinks. Otherwise text may be, and a call
            where a mark stands; its arguments fit the schema if the tool is strict, and are any object if not.
        find: tokens that marks may be.
        thinks, is_thinking: see `AnswerParser`.
    """
    grammar = _Grammar(format, find)
    forced = choice.is_forced
    schemas = [
        {
            **(tool.parameters if forced or tool.is_strict else {"type": "object"}),
            "x-guidance": JSON_OPTIONS | ONE_SPACE,
        }
        for tool in choice.tools
    ]
    calls = grammar.calls(choice.tools, schemas, choice.most)
    before = grammar.thought(is_thinking) if thinks or is_thinking else ""
    if format.shape == "harmony":
        message, begin = grammar.say("<|message|>"), grammar.say("<|channel|>")
        kinds = '"analysis"' if forced else '("analysis" | "commentary")'
        rest = f"{grammar.up_to('rest_of_message', '<|end|>')} {grammar.say('<|start|>', 'assistant')}"
        before = f"({begin} {kinds} {message} {rest})*"
        start = calls if forced else f'({calls} | {begin} "final" {message} TEXT)'
    elif forced:
        start = calls
    elif not format.begins:
        grammar.rules["NO_OBJECT"] = NO_OBJECT
        start = f"({calls} | NO_OBJECT)"
    else:
        mark = grammar.say(format.begins[0])
        rule = grammar.rules["call"].removeprefix(mark)
        grammar.rules["call"] = f"{grammar.up_to('trigger', format.begins[0])} {rule}"
        start = f"call{'?' if choice.most == 1 else '*'} TEXT"
    grammar.rules = {"start": f"{before} {start}", **grammar.rules}
    return grammar.text()
