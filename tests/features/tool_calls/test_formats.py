"""Which format a chat template shows."""

from __future__ import annotations

from nanoengine.features.tool_calls.formats import FORMATS, find_format

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


OTHERS = {
    "llama3": "{{- '\"parameters\": ' }} {{- '<|python_end|>' }} {{- '<|header_start|>ipython<|header_end|>' }}",  # Llama 4
    "lfm2": '{{ "List of tools: <|tool_list_start|>[" + (tools | tojson) + "]<|tool_list_end|>" }}',
}


def test_a_template_shows_its_format() -> None:
    for name, words in [*SEEN.items(), *OTHERS.items()]:
        found = find_format(f"{{# #}}{words}{{{{ messages }}}}")
        assert found is not None
        assert found.name == name
    assert find_format("{{ messages }}{{ tools | tojson }}") is None
    assert SEEN.keys() == {own.name for own in FORMATS}
