"""Which format a chat template shows."""

from __future__ import annotations

import pytest

from nanoengine.models.tools.formats import FORMATS, find_format

SEEN = {
    "harmony": '{{ "<|start|>assistant<|channel|>final<|message|>" }} {{ "parameters" }}',
    "mistral_args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "phi": "{{ '<|tool_call|>' + (call | tojson) + '<|/tool_call|>' }}",
    "granite": "respond only with <|tool_call|> followed by a JSON list",
    "functools": "functools[{...}]",
    "lfm2": "{{ '<|tool_call_start|>[' + (calls | join(', ')) + ']<|tool_call_end|>' }}",
    "qwen3_coder": "<tool_call>\\n<function=name>\\n<parameter=key>\\n",
    "hermes": '<tool_call>\\n{{ "parameters" }}',
    "llama3": "{{ 'Environment: ipython' }}",
}
"""Words of the templates of models that write calls so."""


@pytest.mark.parametrize("name", SEEN)
def test_a_template_shows_its_format(name: str) -> None:
    found = find_format(f"{{# #}}{SEEN[name]}{{{{ messages }}}}")
    assert found is not None
    assert found.name == name


def test_llama_4_writes_calls_as_llama_3_does() -> None:
    words = "{{- '\"parameters\": ' }} {{- '<|python_end|>' }} {{- '<|header_start|>ipython<|header_end|>' }}"
    found = find_format(words)
    assert found is not None
    assert found.name == "llama3"


def test_lfm2_shows_how_it_is_told_of_tools() -> None:
    found = find_format('{{ "List of tools: <|tool_list_start|>[" + (tools | tojson) + "]<|tool_list_end|>" }}')
    assert found is not None
    assert found.name == "lfm2"


def test_others_show_none() -> None:
    assert find_format("{{ messages }}{{ tools | tojson }}") is None
    assert SEEN.keys() == {own.name for own in FORMATS}
