"""Chats: renders conversations with tools by the chat template of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from nanoengine.core.errors import InvalidPrompt
from nanoengine.core.outputs import RequestOutput
from nanoengine.features.tool_calls.formats import END_OF_THOUGHT, HERMES, PLAIN, THINK, find_format
from nanoengine.features.tool_calls.harmony import END_OF_ANALYSIS
from nanoengine.features.tool_calls.prompt import Answer, Prompt
from nanoengine.features.tool_calls.template_messages import (
    INSTRUCTIONS_START,
    Message,
    as_text,
    for_template,
    tools_for_template,
)
from nanoengine.features.tool_calls.thinking_switch import thinking_values
from nanoengine.features.tool_calls.tool import choose, read_tools
from nanoengine.models.tokenizer import ModelTokenizer

PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
HELLO: list[Message] = [{"role": "user", "content": "Hello"}]


class Chats:
    """Renderer of conversations for the model of a tokenizer."""

    def __init__(self, tokenizer: ModelTokenizer):
        self.tokenizer = tokenizer
        added = tokenizer.fast.get_added_tokens_decoder()
        self._tokens = {token.content: number for number, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._has_tools: dict[str, bool] = {}
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
        **options: bool,
    ) -> Prompt:
        """A conversation for the model.

        Args:
            messages: in the form of OpenAI's API.
            tools: JSON schemas of functions.
            tool_choice: "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.
            parallel: one answer may have several calls.
            template_kwargs, options: see `ModelTokenizer.render_chat`.

        Raises:
            InvalidPrompt: no chat template; messages or tools that it refuses or omits.
            InvalidSamplingParams: an invalid `tool_choice`.
        """
        if isinstance(template_kwargs, Mapping):
            template_kwargs = thinking_values(template_kwargs)
        choice = choose(read_tools(tools), tool_choice, parallel=parallel is not False)
        tools = tools_for_template(tools)
        turns = for_template(messages)
        template = self.tokenizer.chat_template(tools is not None)
        format, render = find_format(template) or PLAIN, self.tokenizer.render_chat
        if not self._supports_tools(template):
            format, render, tools = HERMES, self._render_as_text, None if choice.is_off else tools
        head = text = render(turns, template_kwargs, tools, **options)
        if options.get("continue_final_message") and len(turns) > 1:
            head = commonprefix([text, render(turns[:-1], template_kwargs, tools)])  # noqa: RUF071 - characters
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
        return [prompt.read(answer.text, answer.finish_reason == "length") for answer in output.outputs]

    def _render_as_text(
        self, messages: Sequence[Message], template_kwargs: Any = None, tools: Any = None, **options: bool
    ) -> str:
        """Render for a template without tools: they become text."""
        try:
            texts = as_text(messages, tools)
        except (ValueError, RecursionError) as error:  # arguments that JSON cannot represent
            raise InvalidPrompt("messages", f": a call cannot be written as JSON: {error}") from error
        text = self.tokenizer.render_chat(texts, template_kwargs, None, **options)
        if tools and INSTRUCTIONS_START not in text:
            raise InvalidPrompt("tools", " are given, but the chat template knows of none, and no system message")
        return text

    def _supports_tools(self, template: str) -> bool:
        """Whether a template writes tools into the prompt: one trial for each template, without data of a request."""
        if template not in self._has_tools:
            try:
                texts = [self.tokenizer.render_chat(HELLO, None, tools) for tools in ([PROBE], None)]
                self._has_tools[template] = texts[0] != texts[1]
            except InvalidPrompt:  # the request's rendering reports it
                return True
        return self._has_tools[template]
