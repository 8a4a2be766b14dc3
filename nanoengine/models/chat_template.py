"""Chat templates: a conversation to the text for a model, as transformers renders it.

A template is a program in the files of a model. It runs in Jinja's sandbox, in a process with limits (`template_client.py`), and
without transformers, whose import is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoengine.core.model_config import read_file
from nanoengine.errors import InvalidConfig, InvalidPrompt, shown
from nanoengine.models.template_client import TemplateClient

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in a message. Templates read the first, gpt-oss's the second."""


MAY_SAY_NOTHING = ("assistant", "tool")
"""Roles of messages without content: a model that ended at once, a tool without a result."""

MAX_BYTES = 1 << 20
"""Limit of a template in an option; templates of models have some 10,000 bytes."""

MARK = "\ue000end of the last message\ue001"
"""The end of a message to continue, with characters of the private use area."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    client: TemplateClient,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The text of a conversation.

    Args:
        template: the Jinja program.
        messages: each with a role, a content (text, or a list of parts if the template supports it), and optional keys
            such as tool_calls.
        client: renders the template.
        special_tokens: texts by their names in templates, such as "bos_token".
        tools: JSON schemas of functions that the model may call.
        add_generation_prompt: end with the start of the model's answer.
        continue_final_message: end inside the last message, without the template's end of it.
        template_kwargs: further variables of the template; the arguments above have precedence.

    Values in messages and variables that are None or empty are removed: templates would print them.

    Raises:
        InvalidPrompt: invalid messages or tools; the template refuses them, with its message; or it is broken, or exceeds its
            limits.
    """
    _check_messages(messages)
    _check_tools(tools)
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise InvalidPrompt("chat_template_kwargs", f" must be a table, not {shown(template_kwargs)}")
    if continue_final_message:
        messages = [*messages[:-1], _open_ended(messages[-1])]
    values = {
        "documents": None,
        **_without_empty(template_kwargs or {}),
        **special_tokens,
        "tools": tools or None,
        "add_generation_prompt": add_generation_prompt,
        "messages": [_with_reasoning(_with_content(_without_empty(message))) for message in messages],
    }
    try:
        text = client.render(template, _plain(values))
    except RecursionError as error:
        raise InvalidPrompt("messages", f", tools or chat_template_kwargs are nested too deeply: {error}") from error
    return _cut_at_mark(text) if continue_final_message else text


def read_template(source: Any) -> str:
    """The text of a template, from the text or the path of a file: templates have a "{", paths do not.

    Raises:
        InvalidConfig: it cannot be read, or is not a template.
    """
    try:
        if not isinstance(source, str | Path):
            raise ValueError("it is neither")
        is_text = isinstance(source, str) and "{" in source
        text = str(source) if is_text else read_file(Path(source), MAX_BYTES).decode()
        if "{" not in text or len(text) > MAX_BYTES:
            raise ValueError(f'it has {len(text)} characters, and must have a "{{" among them')
        TemplateClient().render(text, None)
    except (OSError, ValueError) as error:
        must = f"a file of at most {MAX_BYTES} bytes with a Jinja template, or the text of one"
        name = str(source) if isinstance(source, Path) else source
        raise InvalidConfig(f"chat_template is {shown(name)}: it must be {must}: {str(error)[:200]}") from error
    return text


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidPrompt("messages", ": the conversation is empty: it must have at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not _has_content(message):
            must = "must have a role and a content, or tool_calls in its place"
            raise InvalidPrompt(f"messages[{index}]", f" {must}, not {shown(message)}")


def _check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    if tools is not None and not isinstance(tools, list | tuple):
        raise InvalidPrompt("tools", f" must be a list of JSON schemas of functions, not {shown(tools)}")
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            raise InvalidPrompt("tools", f": a tool must be a table, the JSON schema of a function, not {shown(tool)}")


def _open_ended(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose end is marked in the rendered text."""
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidPrompt("continue_final_message", f" needs a last message of text, not {shown(content)}")
    return {**message, "content": content + MARK + " "}


def _cut_at_mark(text: str) -> str:
    """The text up to the end of the last message, which is stripped if the template has stripped the space behind the mark."""
    head, mark, tail = text.rpartition(MARK)
    if not mark:
        raise InvalidPrompt("continue_final_message", ": the chat template leaves the last message out")
    return head if tail.startswith(" ") else head.rstrip()


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if _is_empty(content):
        return message["role"] in MAY_SAY_NOTHING or bool(message.get("tool_calls"))
    return isinstance(content, str | list | tuple)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def _without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if not _is_empty(value)}


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a content, unless it has calls."""
    return message if "tool_calls" in message else {"content": "", **message}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names in templates."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy in JSON's types: methods of other objects could be dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # of a subclass, such as an enum
            return kind.__str__(value) if kind is str else kind(value)
    must = ", tools and variables of a template must be text, numbers, lists and tables"
    raise InvalidPrompt("messages", f"{must}, not {shown(value)}")
