"""Chats: renders conversations with tools for a model, forces calls, and reads its answers."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams
from nanoengine.core.outputs import RequestOutput
from nanoengine.features.tool_calls.formats import (
    END_OF_THOUGHT,
    HERMES,
    PLAIN,
    THINK,
    ToolFormat,
    bare_marks,
    find_format,
)
from nanoengine.features.tool_calls.grammar import call_grammar
from nanoengine.features.tool_calls.harmony import (
    ANALYSIS_BEGUN,
    BODY,
    END_OF_ANALYSIS,
    FINAL,
    NO_THOUGHT,
    message_begun,
)
from nanoengine.features.tool_calls.parser import Call, Event, Reading, Reasoning, Text, answer_parser
from nanoengine.features.tool_calls.template_messages import (
    TOLD_FIRST,
    Message,
    for_template,
    in_words,
    tools_for_template,
)
from nanoengine.features.tool_calls.thinking_switch import thinking_values
from nanoengine.features.tool_calls.tool import Choice, choose, read_tools
from nanoengine.models.tokenizer import ModelTokenizer
from nanoengine.thought import Thought

PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
HELLO: list[Message] = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer: text for the user, thoughts, and calls of tools."""

    text: str
    reasoning: str
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation, and how its answer is sampled and read.

    Args:
        text: for the model.
        format: of calls; None: the answer has neither calls nor channels.
        choice: of tools.
        thinks, is_thinking: see `answer_parser`.
        begun: the part of the answer that ends the text, where a message is continued.
        end_of_thought: the tokens that end a thought which has reached its limit.
        tokens: the ids of the added tokens by their texts.
        special: texts of the special tokens, which answers do not show unless a request asks for them.
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
    def _kept(self) -> set[str]:
        """Special tokens that the parser needs."""
        marks = () if self.format is None else self.format.marks
        return {*marks, *((THINK, END_OF_THOUGHT) if self.thinks else ())} & self.special

    def params(self, params: Any) -> Any:
        """Sampling parameters with which the answer can be parsed, and calls are forced as the choice of tools says.

        Raises:
            InvalidSamplingParams: a call is forced where the text has another grammar; a schema that no grammar can hold; or
                structured outputs are not installed.
        """
        changes: dict[str, Any] = {}
        if self._kept and params.skip_special_tokens:
            changes["skip_special_tokens"] = False
        own, choice = params.structured_outputs, self.choice
        schema = None
        if (
            own is not None
            and not choice.is_off
            and own.key[2:] == (True, None)
            and own.kind in ("json", "json_object")
        ):
            schema = json.loads(own.text)
        if schema is not None or self._has_grammar:
            if own is not None and schema is None:
                raise InvalidSamplingParams(
                    "tool_choice forces calls, or a tool is strict, and structured outputs say what the text is, other than by"
                    " a schema: give one of them"
                )
            changes["structured_outputs"] = self._grammar(params.skip_special_tokens, schema)
        return self.answered(dataclasses.replace(params, **changes) if changes else params)

    def answered(self, params: Any) -> Any:
        """Sampling parameters that hold for the answer, and not for the thought in front of it."""
        thought = self.thought if params.is_of_answer else None
        return params if thought is None else dataclasses.replace(params, thought=thought)

    @property
    def thought(self) -> Thought | None:
        """How the answer marks its thought; None: there is none, or it has marks that are read with the text alone."""
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
        calls = tuple(token for mark in self._begins if (token := self.tokens.get(mark)) is not None)
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
        """Marks with which a call begins, where the model may call."""
        return () if self.format is None or self.choice.is_off else self.format.begins

    @property
    def _has_grammar(self) -> bool:
        """Whether calls must fit a grammar."""
        return self.choice.is_forced or (not self.choice.is_off and any(tool.is_strict for tool in self.choice.tools))

    def _grammar(self, skip_special_tokens: bool, schema: Any) -> dict[str, Any]:
        assert self.format is not None
        is_apart = self.thought is not None and not self._is_harmony  # the grammar is of the answer alone
        text = call_grammar(
            self.format,
            self.choice,
            self.tokens.get,
            thinks=self.thinks and not is_apart,
            is_thinking=self.is_thinking and not is_apart,
            schema=schema,
        )
        until = None
        if self.choice.is_forced and self.choice.most != 1:
            until = partial(_end_of_calls, self, skip_special_tokens)
        return {"grammar": text, "until": until, "with_thought": not is_apart}

    def parser(self, skip_special_tokens: bool = True) -> Reading:
        """A parser for one answer, behind what is begun of it."""
        whole = [] if self.choice.is_off else [tool.name for tool in self.choice.tools if not tool.is_strict]
        begins = [mark for mark in self._begins if mark in self.tokens or not self._has_grammar]
        reader = answer_parser(
            self.format,
            () if self.choice.is_off else {tool.name for tool in self.choice.tools},
            thinks=self.thinks,
            is_thinking=self.is_thinking,
            dropped=self.special - self._kept if self._kept and skip_special_tokens else (),
            most=self.choice.most,
            whole=whole,
            schemas={tool.name: tool.parameters for tool in self.choice.tools},
            is_forced=self.choice.is_forced,
            thought_calls=[*begins, *bare_marks(self.format, whole)],
        )
        if self.begun:
            reader.resume(self.begun)
        return reader

    def read(self, text: str, is_cut: bool = False) -> Answer:
        """The parts of a whole answer, or of one that a limit has cut off (see `Reading.finish`)."""
        return answer_of(self.parser().read(text, "length" if is_cut else "stop"))

    def new_id(self) -> str:
        """An id for a call; Mistral's templates take nine letters alone."""
        name = uuid.uuid4().hex
        return name[:9] if self.format is not None and self.format.name.startswith("mistral") else f"call_{name}"


def _end_of_calls(prompt: Prompt, skip_special_tokens: bool) -> Callable[[str], str | None]:
    return prompt.parser(skip_special_tokens).end


def plain_prompt(text: str) -> Prompt:
    """A prompt without a chat template; its answer is text alone."""
    return Prompt(text, None, Choice((), is_off=True), False, False, {}, frozenset())


def answer_of(events: Sequence[Event]) -> Answer:
    """The answer of some events."""
    text, reasoning, calls = "", "", []
    for event in events:
        if isinstance(event, Call):
            calls.append(event)
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Text):
            text += event.text
    return Answer(text, reasoning, calls)


class Chats:
    """Conversations with the model of a tokenizer."""

    def __init__(self, tokenizer: ModelTokenizer):
        self.tokenizer = tokenizer
        added = tokenizer.fast.get_added_tokens_decoder()
        self._tokens = {token.content: number for number, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._knows: dict[str, bool] = {}
        texts = (f"\n{END_OF_THOUGHT}\n\n", END_OF_ANALYSIS)
        self._ends = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        parallel: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Prompt:
        """A conversation for the model.

        Args:
            messages: turns, as OpenAI's clients write them.
            tools: JSON schemas of functions.
            tool_choice: "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.
            parallel: there may be several calls in one answer.
            template_kwargs, add_generation_prompt, continue_final_message: see `ModelTokenizer.render_chat`.

        Raises:
            InvalidPrompt: no chat template; messages or tools that it does not take, or leaves out.
            InvalidSamplingParams: a `tool_choice` that is none.
        """
        options = (add_generation_prompt, continue_final_message)
        if isinstance(template_kwargs, Mapping):
            template_kwargs = thinking_values(template_kwargs)
        choice = choose(read_tools(tools), tool_choice, parallel=parallel is not False)
        tools = tools_for_template(tools)
        turns = for_template(messages)
        template = self.tokenizer.chat_template(tools is not None)
        if self._knows_tools(template):
            format, render = find_format(template) or PLAIN, self._render
        else:
            format, render, tools = HERMES, self._in_words, None if choice.is_off else tools
        text = render(turns, template_kwargs, tools, options)
        head = text
        if continue_final_message and len(turns) > 1:
            head = commonprefix([text, render(turns[:-1], template_kwargs, tools, (True, False))])  # noqa: RUF071 - characters
        is_harmony = format.shape == "harmony"
        is_thinking = not is_harmony and head.rstrip().endswith(THINK)
        return Prompt(
            text,
            None if choice.is_off and not is_harmony else format,
            choice,
            not is_harmony and (is_thinking or END_OF_THOUGHT in template),
            is_thinking,
            self._tokens,
            self._special,
            text[len(head) :],
            self._ends[is_harmony],
        )

    def read(
        self,
        output: RequestOutput,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """The parts of the completions of a chat. Arguments as for `prompt`."""
        prompt = self.prompt(HELLO, tools, tool_choice)
        end = self.tokenizer.decode(output.prompt_token_ids[-8:], skip_special_tokens=False)
        is_thinking = prompt.thinks and end.rstrip().endswith(THINK)
        prompt = dataclasses.replace(prompt, is_thinking=is_thinking)
        return [prompt.read(own.text, own.finish_reason == "length") for own in output.outputs]

    def _render(self, messages: Sequence[Message], kwargs: Any, tools: Any, options: tuple[bool, bool]) -> str:
        first, second = options
        return self.tokenizer.render_chat(
            messages, kwargs, tools, add_generation_prompt=first, continue_final_message=second
        )

    def _in_words(self, messages: Sequence[Message], kwargs: Any, tools: Any, options: tuple[bool, bool]) -> str:
        """Render for a template that does not know tools: they are told in words."""
        try:
            told = in_words(messages, tools)
        except (ValueError, RecursionError) as error:  # arguments of a call that JSON does not have
            raise InvalidPrompt(f"messages: a call cannot be written as JSON: {error}") from error
        text = self._render(told, kwargs, None, options)
        if tools and TOLD_FIRST not in text:
            raise InvalidPrompt("tools are given, but the chat template knows of none, and leaves system messages out")
        return text

    def _knows_tools(self, template: str) -> bool:
        """Whether a template writes tools into the prompt. It is tried once, without anything of a request."""
        if template not in self._knows:
            try:
                texts = [self._render(HELLO, None, tools, (True, False)) for tools in ([PROBE], None)]
                self._knows[template] = texts[0] != texts[1]
            except InvalidPrompt:  # it will say itself what it does not take
                return True
        return self._knows[template]
