"""Chat templates: the same text as transformers renders, and errors that say what to change."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from nanoengine.errors import InvalidPrompt
from nanoengine.models.chat_template import render
from tests.vectors import vectors

TRANSFORMERS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), bos_token="<s>", eos_token="</s>")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER = {
    "name": "weather",
    "description": "Weather <of> a city & more",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'Wie wird\'s <morgen> & "so"?'}
ASSISTANT = {"role": "assistant", "content": "Warm.\n"}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": CALLS}
BARE_CALL = {"role": "assistant", "tool_calls": CALLS}
RESULT = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "call00001", "name": "weather"}
THOUGHT = {"role": "assistant", "content": "Yes", "reasoning": "Let me think"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]}

CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([USER], None),
    ([SYSTEM, USER, ASSISTANT, USER], None),
    ([SYSTEM, USER], TOOLS),
    ([SYSTEM, USER, CALL, RESULT], TOOLS),
    ([USER, BARE_CALL, RESULT, ASSISTANT, USER], TOOLS),
    ([USER, THOUGHT, USER], None),
    ([SYSTEM, PARTS], None),
    ([{"role": "villain", "content": "x"}], None),
]


GOING_ON = {"add_generation_prompt": False, "continue_final_message": True}
STRIPPING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
KEEPING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def ours(template: str, messages: Any, **options: Any) -> str:
    return render(template, messages, **({"special_tokens": SPECIAL_TOKENS} | options))


def outcome(rendering: Callable[[], Any]) -> tuple[str, str]:
    try:
        return "text", rendering()
    except Exception as error:  # templates refuse with whatever they like
        return "refused", str(error)


def check_same(template: str, messages: Any, tools: Any, words: bool = True, **options: Any) -> None:
    """Both give the same text, or refuse, in the same `words`."""
    theirs = {"chat_template": template, "tokenize": False} | options
    kind, text = outcome(lambda: TRANSFORMERS.apply_chat_template(copy.deepcopy(messages), tools, **theirs))
    kwargs = {name: options.pop(name) for name in [*options] if name == "enable_thinking"}
    own_kind, own_text = outcome(lambda: ours(template, messages, tools=tools, template_kwargs=kwargs, **options))
    assert own_kind == kind
    assert (not words or text in own_text) if kind == "refused" else text == own_text


# ---- the same text


def test_llama_cpps_templates_give_transformers_texts() -> None:
    for path in vectors("templates/*.jinja"):
        template = path.read_text(encoding="utf-8")
        for messages, tools in CHATS:
            check_same(template, messages, tools, add_generation_prompt=True)
        check_same(template, [USER], None, add_generation_prompt=False, enable_thinking=False)
        for messages in ([USER, ASSISTANT], [SYSTEM, USER, {"role": "assistant", "content": "Well, it"}]):
            check_same(template, messages, None, words=False, **GOING_ON)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}\nend\n",
        "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{% generation %}\n{{ m.content }}{% set x = 1 %}{% endgeneration %}\n{% endfor %}{{ x }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
        "{{ messages[0].reasoning_content }}{{ messages[1].thinking }}{{ messages[2].content is defined }}",
        "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
        "{{ raise_exception('no ' ~ messages[0].role) }}",
        "{{ messages[0].content.nothing.more }}",
        "{% for m in messages %}{{ m.content }",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_means_what_it_means_to_transformers(template: str) -> None:
    for messages, tools in CHATS:
        check_same(template, messages, tools, add_generation_prompt=True)
    check_same(template, [THOUGHT, THOUGHT, CALL], TOOLS, add_generation_prompt=False)


def test_what_is_asked_for_replaces_nothing_and_a_generation_prompt_is_there_unless_refused() -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ style }}{{ tools }}{% if add_generation_prompt %}:{% endif %}"
    asked = {"bos_token": "!", "style": "x", "tools": 1, "add_generation_prompt": False, "messages": []}
    assert ours(template, [USER], template_kwargs=asked) == "<s></s>xNone:"
    template = template.replace("{{ tools }}", "")
    for mark in ("", "\ufeff"):  # some editors begin files with it
        assert ours(mark + template, [USER], add_generation_prompt=False) == "<s></s>"


def test_a_template_sees_nothing_but_plain_values() -> None:
    class Role(enum.StrEnum):
        USER = "user"

        def shout(self) -> str:
            return "USER"

    assert ours("{{ messages[0].role }}", [{"role": Role.USER, "content": "x"}]) == "user"
    with pytest.raises(InvalidPrompt, match="has no attribute 'shout'"):
        ours("{{ messages[0].role.shout() }}", [{"role": Role.USER, "content": "x"}])
    with pytest.raises(InvalidPrompt, match=r"must be text, numbers, lists and tables, not .*Path"):
        ours("{{ path }}", [USER], template_kwargs={"path": Path("x")})


# ---- what is wrong


NO_CONTENT = r"^messages\[1\] must have a role and a content, or tool_calls in its place"
NO_MESSAGES: list[Any] = [
    *("hello", None, 3, ["user", "hello"], {}, {"content": "hello"}, {"role": "user"}),
    *({"role": "user", "content": None}, {"role": "user", "content": 3}),
    *({"role": "user", "content": []}, {"role": "assistant", "content": 3, "tool_calls": CALLS}),
]
REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    *(("", [USER, message], {}, NO_CONTENT) for message in NO_MESSAGES),
    ("", [], {}, "the conversation is empty"),
    *(
        ("", [USER], {"tools": tools}, r"tools? must be a .*JSON schema")
        for tools in (["weather"], [TOOLS], "weather", {"type": "function"})
    ),
    (
        *("{{ raise_exception('no villains here') }}", [USER], {}),
        "the chat template refused the messages: no villains here",
    ),
    *(
        (KEEPING, [USER, message], {"continue_final_message": True}, "continue_final_message")
        for message in (PARTS, CALL, BARE_CALL)
    ),
    (
        *("{{ messages[0].content }}", [USER, ASSISTANT], {"continue_final_message": True}),
        "leaves the last message out",
    ),
]


def test_what_is_wrong_is_told() -> None:
    for template, messages, options, message in REFUSED:
        with pytest.raises(InvalidPrompt, match=message):
            ours(template, messages, **options)


def test_messages_too_deep_for_a_template_are_refused() -> None:
    content: list[Any] = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(InvalidPrompt, match="recursion"):
        ours("{{ messages }}", [{"role": "user", "content": content}])


# ---- going on with the last message

ENDINGS = ["Warm", "Warm ", " Warm", "Warm\n", "", " ", "<|im_end|>", "{{ x }}", "Warm" * 3, "wird's <morgen>"]


@pytest.mark.parametrize("template", [KEEPING, STRIPPING])
def test_a_message_is_gone_on_with_where_transformers_does(template: str) -> None:
    for content in ENDINGS:
        messages = [USER, {"role": "assistant", "content": content}]
        check_same(template, messages, None, **GOING_ON)
        text = ours(template, messages, **GOING_ON)
        assert text.endswith(content if template is KEEPING else content.strip())


def test_the_messages_before_the_last_are_whole_and_left_as_they_were() -> None:
    messages = [ASSISTANT, USER, dict(ASSISTANT)]
    text = ours(KEEPING, messages, **GOING_ON)
    assert text == f"<assistant>Warm.\n</s>\n<user>{USER['content']}</s>\n<assistant>Warm.\n"
    assert messages == [ASSISTANT, USER, ASSISTANT]
