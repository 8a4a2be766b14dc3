"""A pytest plugin: vLLM's tests of its parsers of tool calls and thoughts, on nanoengine's Reading.

Each of vLLM's parsers is one of ours here, which reads the same text in the same pieces. Tokenizers of models on the hub are the
demo model's with the marks of all formats added: what is tested reads text, and only where it is cut comes from a tokenizer.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
import vllm_stand_in

import nanoengine
from nanoengine.models.tools.formats import FORMATS, HARMONY_MARKS, HERMES, ToolFormat
from nanoengine.models.tools.parser import Call, Event, Reading, Reasoning, Text, answer_parser

DEMO = Path(nanoengine.__file__).parent / "demo"
MARKS = {mark for format in FORMATS for mark in format.marks} | {"<think>", "</think>"}
BY_NAME = {format.name: format for format in FORMATS}
_load = transformers.AutoTokenizer.from_pretrained


# ---- what answers are told in


@dataclass
class FunctionCall:
    name: str | None = None
    arguments: str | None = None


@dataclass
class ToolCall:
    function: FunctionCall
    id: str = ""
    type: str | None = "function"


@dataclass
class DeltaToolCall:
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


@dataclass
class DeltaMessage:
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = field(default_factory=list)


@dataclass
class ExtractedToolCallInformation:
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None


class ChatCompletionRequest:
    """A request: nothing of it says how an answer is read, but that there are tools."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def of_kind(events: Sequence[Event], kind: type[Text | Reasoning]) -> str | None:
    return "".join(event.text for event in events if isinstance(event, kind)) or None


def delta_of(events: Sequence[Event]) -> DeltaMessage | None:
    """What is new, as one message of a stream; None if nothing is."""
    calls = [
        DeltaToolCall(own.index, f"call-{own.index:04}", "function", FunctionCall(own.name, own.arguments))
        for own in events
        if isinstance(own, Call)
    ]
    return DeltaMessage(None, of_kind(events, Text), of_kind(events, Reasoning), calls) if events else None


def calls_of(events: Sequence[Event]) -> list[ToolCall]:
    calls = [own for own in events if isinstance(own, Call)]
    return [ToolCall(FunctionCall(own.name, own.arguments), f"call-{own.index:04}") for own in calls]


# ---- parsers


class ToolParser:
    """vLLM's interface of a parser of calls."""

    format: ToolFormat = HERMES

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self.model_tokenizer, self.tools, self.vocab = tokenizer, tools, tokenizer.get_vocab()
        self._parser: Reading | None = None

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        del request
        parser = answer_parser(self.format)
        events = [*parser.push(model_output), *parser.finish()]
        calls = calls_of(events)
        return ExtractedToolCallInformation(bool(calls), calls, of_kind(events, Text))

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any, **__: Any
    ) -> DeltaMessage | None:
        if self._parser is None or (not previous_text and current_text == delta_text):
            self._parser = answer_parser(self.format)
        return delta_of(self._parser.push(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        assert self._parser is not None
        return delta_of(self._parser.finish())


def tool_parser(name: str) -> type[ToolParser]:
    """vLLM's parser with one of our formats."""
    return type(f"{name}ToolParser", (ToolParser,), {"format": BY_NAME[name]})


class ReasoningParser:
    """vLLM's interface of a parser of thoughts; a prompt has begun one, unless it is told that the model does not think."""

    def __init__(self, tokenizer: Any, *_: Any, chat_template_kwargs: dict[str, Any] | None = None, **__: Any) -> None:
        kwargs = chat_template_kwargs or {}
        self.model_tokenizer, self.vocab = tokenizer, tokenizer.get_vocab()
        self.is_thinking = kwargs.get("enable_thinking", kwargs.get("thinking", True))
        self._parser = self._new()

    def _new(self) -> Reading:
        return answer_parser(None, thinks=True, is_thinking=self.is_thinking)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        del request
        parser = self._new()
        events = [*parser.push(model_output), *parser.finish()]
        return of_kind(events, Reasoning), of_kind(events, Text)

    def extract_reasoning_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *_: Any
    ) -> DeltaMessage | None:
        del current_text
        if not previous_text:
            self._parser = self._new()
        return delta_of(self._parser.push(delta_text))


# ---- harmony: a message's ids are the characters of its text


class Encoding:
    """Of openai-harmony's encoding, what the tests ask; its vocabulary is a download."""

    def encode(self, text: str, **_: Any) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, HARMONY_MARKS))})", text)
        return [
            number
            for part in parts
            for number in ([-1 - HARMONY_MARKS.index(part)] if part in HARMONY_MARKS else map(ord, part))
        ]

    def decode_utf8(self, ids: Sequence[int]) -> str:
        return "".join(HARMONY_MARKS[-1 - own] if own < 0 else chr(own) for own in ids)

    def render_conversation(self, conversation: Any, config: Any = None) -> list[int]:
        del config
        return self.encode("".join(self._message(own.to_dict()) for own in conversation.messages))

    def render_conversation_for_completion(self, conversation: Any, role: Any, config: Any = None) -> list[int]:
        return self.render_conversation(conversation, config) + self.encode(f"<|start|>{role.value}")

    def _message(self, own: dict[str, Any]) -> str:
        head = f"<|start|>{getattr(own['role'], 'value', own['role'])}"
        to, channel, kind = (own.get(name) for name in ("recipient", "channel", "content_type"))
        head += f" to={to}" if to else ""
        head += f"<|channel|>{channel}" if channel else ""
        head += f" {kind}" if kind else ""
        text = "".join(part["text"] for part in own["content"]) if isinstance(own["content"], list) else own["content"]
        return f"{head}<|message|>{text}{'<|call|>' if to else '<|end|>'}"


class HarmonyParser:
    """vLLM's parser of whole answers in harmony."""

    def __init__(self, tokenizer: Any = None, *_: Any, **__: Any) -> None:
        del tokenizer
        self._parser = answer_parser(BY_NAME["harmony"])

    def parse(
        self, model_output: str, request: Any, model_output_token_ids: Sequence[int] = (), **_: Any
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        del request
        parser, text = self._parser, model_output or Encoding().decode_utf8(model_output_token_ids)
        events = [*parser.push(text), *parser.finish()]
        calls = [own.function for own in calls_of(events)]
        return of_kind(events, Reasoning), of_kind(events, Text), calls or None

    def parse_delta(
        self, delta_text: str, delta_token_ids: Sequence[int], request: Any, finished: bool, **_: Any
    ) -> DeltaMessage | None:
        del request
        text = delta_text or Encoding().decode_utf8(delta_token_ids)
        return delta_of([*self._parser.push(text), *(self._parser.finish() if finished else ())])


class MistralToolParser(ToolParser):
    """Both of Mistral's formats, told by the tokenizer that the test asks for."""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self.format = BY_NAME["mistral_args" if "Small-3.2" in tokenizer.asked_for else "mistral"]
        self._parser_engine = SimpleNamespace(bot_token="[TOOL_CALLS]", bot_token_id=self.vocab["[TOOL_CALLS]"])


class MistralParser(MistralToolParser):
    """vLLM's parser of whole answers of Mistral's."""

    def parse_delta(self, delta_text: str, finished: bool, **_: Any) -> DeltaMessage | None:
        self._parser = self._parser or answer_parser(self.format)
        return delta_of([*self._parser.push(delta_text), *(self._parser.finish() if finished else ())])


def detokenize_incrementally(tokenizer: Any, all_input_ids: list[int], **_: Any) -> tuple[list[str], str, int, int]:
    before, after = (tokenizer.decode(ids) for ids in (all_input_ids[:-1], all_input_ids))
    return tokenizer.convert_ids_to_tokens(all_input_ids[-1:]), after[len(before) :], 0, 0


# ---- tokenizers


@functools.cache
def _demo() -> Any:
    tokenizer = _load(str(DEMO))
    tokenizer.add_tokens(sorted(MARKS))
    return tokenizer


def tokenizer(tokenizer_name: str = "", **_: Any) -> Any:
    """The demo model's with all marks, whatever is asked for; a copy, for tests change it."""
    own = copy.deepcopy(_demo())
    own.asked_for = tokenizer_name
    return own


transformers.AutoTokenizer = SimpleNamespace(from_pretrained=tokenizer)  # type: ignore[misc]

TOOL_PARSERS = {
    "hermes": tool_parser("hermes"),
    "granite": tool_parser("granite"),
    "granite4": type("Granite4ToolParser", (ToolParser,), {}),
    "llama3_json": tool_parser("llama3"),
    "phi4_mini_json": tool_parser("functools"),
    "mistral": MistralToolParser,
}
PROTOCOL = {
    "DeltaFunctionCall": FunctionCall,
    "DeltaMessage": DeltaMessage,
    "DeltaToolCall": DeltaToolCall,
    "ExtractedToolCallInformation": ExtractedToolCallInformation,
    "FunctionCall": FunctionCall,
    "ToolCall": ToolCall,
}
_PARSERS = {"openai": HarmonyParser, "mistral": MistralParser}
vllm_stand_in.KNOWN |= {
    "vllm.entrypoints.generate.base.protocol": PROTOCOL,
    "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": ChatCompletionRequest},
    "vllm.sampling_params": {"StructuredOutputsParams": ChatCompletionRequest},
    "vllm.entrypoints.openai.parser.harmony_utils": {"get_encoding": Encoding},
    "vllm.parser.harmony": {"HarmonyParser": HarmonyParser},
    "vllm.parser.mistral": {"MistralParser": MistralParser, "_DEFAULT_JSON_SCHEMA": {}},
    "vllm.parser.parser_manager": {
        "ParserManager": SimpleNamespace(get_parser=lambda tool_parser_name, **_: _PARSERS[tool_parser_name])
    },
    "vllm.reasoning": {
        "ReasoningParser": ReasoningParser,
        "ReasoningParserManager": SimpleNamespace(get_reasoning_parser=lambda _: ReasoningParser),
    },
    "vllm.tokenizers": {"get_tokenizer": tokenizer},
    "vllm.tokenizers.detokenizer_utils": {"detokenize_incrementally": detokenize_incrementally},
    "vllm.tool_parsers": {
        "ToolParser": ToolParser,
        "ToolParserManager": SimpleNamespace(get_tool_parser=TOOL_PARSERS.__getitem__),
    },
    "vllm.tool_parsers.granite4_tool_parser": {"Granite4ToolParser": TOOL_PARSERS["granite4"]},
    "vllm.tool_parsers.granite_engine_tool_parser": {"GraniteEngineToolParser": TOOL_PARSERS["granite"]},
    "vllm.tool_parsers.hermes_tool_parser": {"Hermes2ProToolParser": TOOL_PARSERS["hermes"]},
    "vllm.tool_parsers.llama_tool_parser": {"Llama3JsonToolParser": TOOL_PARSERS["llama3_json"]},
    "vllm.tool_parsers.mistral_tool_parser": {"MistralToolParser": MistralToolParser},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _: False},
}
