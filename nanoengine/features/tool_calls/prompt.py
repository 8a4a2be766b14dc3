"""Prompt: a rendered conversation, the sampling parameters of its answer, and the parser of its answer."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanoengine.core.errors import InvalidSamplingParams
from nanoengine.features.thought import Thought
from nanoengine.features.tool_calls.answer_parser import Call, Event, Reasoning, StreamParser, Text, answer_parser
from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, THINK, ToolFormat, bare_delimiters
from nanoengine.features.tool_calls.grammar import call_grammar
from nanoengine.features.tool_calls.harmony import ANALYSIS_BEGUN, BODY, FINAL, NO_THOUGHT, message_begun
from nanoengine.features.tool_calls.tool import Choice


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer: text for the user, reasoning, and tool calls."""

    text: str
    reasoning: str
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation with the rules for sampling and parsing its answer.

    Args:
        text: for the model.
        format: of calls; None: no calls and no channels.
        choice: of tools.
        thinks, is_thinking: see `AnswerRules`.
        begun: the start of the answer at the end of the text, where a message is continued.
        end_of_thought: tokens that end a thought at its limit.
        tokens: the ids of the added tokens by their texts.
        special: texts of the special tokens; answers omit them unless a request sets `skip_special_tokens=False`.
    """

    text: str
    format: ToolFormat | None
    choice: Choice
    thinks: bool
    is_thinking: bool
    tokens: Mapping[str, int]
    special: frozenset[str]
    begun: str = ""
    end_of_thought: tuple[int, ...] = ()

    @property
    def _needed_tokens(self) -> set[str]:
        """Special tokens that the parser needs."""
        delimiters = () if self.format is None else self.format.delimiters
        return {*delimiters, *((THINK, END_OF_THOUGHT) if self.thinks else ())} & self.special

    def params(self, params: Any) -> Any:
        """Sampling parameters that keep the answer parsable and force calls by the choice of tools.

        Raises:
            InvalidSamplingParams: a forced call beside another grammar; a schema that grammars cannot enforce; or structured
                outputs are not installed.
        """
        changes: dict[str, Any] = {}
        if self._needed_tokens and params.skip_special_tokens:
            changes["skip_special_tokens"] = False
        outputs, schema = params.structured_outputs, None
        if outputs is not None and not self.choice.is_off and outputs.key[2:] == (True, None):
            schema = json.loads(outputs.text) if outputs.kind in ("json", "json_object") else None
        if schema is not None or self._has_grammar:
            if outputs is not None and schema is None:
                raise InvalidSamplingParams(
                    "tool_choice",
                    " forces calls, or a tool is strict, and structured_outputs has a grammar of the text other than a schema:"
                    " use one of them",
                )
            changes["structured_outputs"] = self._grammar(params.skip_special_tokens, schema)
        params = dataclasses.replace(params, **changes) if changes else params
        thought = self.thought if params.is_of_answer else None
        return params if thought is None else dataclasses.replace(params, thought=thought)

    @property
    def thought(self) -> Thought | None:
        """The delimiters of the thought; None: there is no thought, or its delimiters are not tokens."""
        if self._is_harmony:
            end = message_begun(FINAL if self.choice.is_off else NO_THOUGHT)
            is_answer = re.search(end, self.begun) is not None
            last = self.tokens.get(BODY)
            return None if is_answer else Thought(end=end, last=last, forced=self.end_of_thought, body=ANALYSIS_BEGUN)
        begin = self.tokens.get(THINK)
        is_thinking = self.is_thinking or self.begun.lstrip().startswith(THINK)
        is_closed = END_OF_THOUGHT in self.begun or self.text.rstrip().endswith(END_OF_THOUGHT)
        if is_closed or not (is_thinking or (self.thinks and begin is not None and not self.begun)):
            return None
        calls = tuple(token for text in self._begins if (token := self.tokens.get(text)) is not None)
        return Thought(
            end=re.escape(END_OF_THOUGHT),
            begin=None if is_thinking or begin is None else (begin, THINK),
            last=self.tokens.get(END_OF_THOUGHT),
            calls=calls,
            forced=self.end_of_thought,
        )

    @property
    def _is_harmony(self) -> bool:
        return self.format is not None and self.format.shape == "harmony"

    @property
    def _begins(self) -> tuple[str, ...]:
        """Start delimiters of a call, where the model may call."""
        return () if self.format is None or self.choice.is_off else self.format.begins

    @property
    def _has_grammar(self) -> bool:
        """Whether a grammar restricts calls."""
        return self.choice.is_forced or (not self.choice.is_off and any(tool.is_strict for tool in self.choice.tools))

    def _grammar(self, skip_special_tokens: bool, schema: Any) -> dict[str, Any]:
        assert self.format is not None
        is_apart = self.thought is not None and not self._is_harmony  # the grammar covers the answer alone
        text = call_grammar(
            self.format,
            self.choice,
            self.tokens.get,
            thinks=self.thinks and not is_apart,
            is_thinking=self.is_thinking and not is_apart,
            schema=schema,
        )
        until = None
        if self.choice.is_forced and self.choice.max_calls != 1:
            until = partial(_end_of_calls, self, skip_special_tokens)
        return {"grammar": text, "until": until, "with_thought": not is_apart}

    def parser(self, skip_special_tokens: bool = True) -> StreamParser:
        """A parser for one answer, behind its start in the prompt."""
        whole = [] if self.choice.is_off else [tool.name for tool in self.choice.tools if not tool.is_strict]
        begins = [text for text in self._begins if text in self.tokens or not self._has_grammar]
        reader = answer_parser(
            self.format,
            () if self.choice.is_off else {tool.name for tool in self.choice.tools},
            thinks=self.thinks,
            is_thinking=self.is_thinking,
            dropped=self.special - self._needed_tokens if self._needed_tokens and skip_special_tokens else (),
            max_calls=self.choice.max_calls,
            whole=whole,
            schemas={tool.name: tool.parameters for tool in self.choice.tools},
            is_forced=self.choice.is_forced,
            thought_calls=[*begins, *bare_delimiters(self.format, whole)],
        )
        if self.begun:
            reader.resume(self.begun)
        return reader

    def read(self, text: str, is_cut: bool = False) -> Answer:
        """The parts of a complete answer; `is_cut`: a limit cut it off (see `StreamParser.finish`)."""
        return answer_of(self.parser().read(text, "length" if is_cut else "stop"))

    def new_id(self) -> str:
        """An id for a call; Mistral's templates require nine letters."""
        name = uuid.uuid4().hex
        return name[:9] if self.format is not None and self.format.name.startswith("mistral") else f"call_{name}"


def _end_of_calls(prompt: Prompt, skip_special_tokens: bool) -> Callable[[str], str | None]:
    return prompt.parser(skip_special_tokens).end


def plain_prompt(text: str) -> Prompt:
    """A prompt without a chat template; its answer is text alone."""
    return Prompt(text, None, Choice((), is_off=True), False, False, {}, frozenset())


def answer_of(events: Sequence[Event]) -> Answer:
    """The answer that events add up to."""
    text, reasoning, calls = "", "", []
    for event in events:
        if isinstance(event, Call):
            calls.append(event)
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Text):
            text += event.text
    return Answer(text, reasoning, calls)
