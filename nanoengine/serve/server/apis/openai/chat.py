"""POST /v1/chat/completions: the next turn of a conversation, which is rendered by the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.outputs import CompletionOutput, RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.features.tool_calls.answer_parser import CallPiece, Event, PlainText
from nanoengine.features.tool_calls.call_emitter import without_incomplete_calls
from nanoengine.features.tool_calls.prompt import answer_of
from nanoengine.serve.aio.request_stream import Delta
from nanoengine.serve.server.apis.conversation import Conversation, ended_by
from nanoengine.serve.server.apis.event_stream import EventStream
from nanoengine.serve.server.apis.json_response import encode
from nanoengine.serve.server.apis.openai.choices import ChoicesAnswer
from nanoengine.serve.server.apis.openai.logprobs import Progress
from nanoengine.serve.server.bodies.chat_encoder import joined
from nanoengine.serve.server.bodies.protocol import ChatRequest
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel
from nanoengine.serve.server.submission import Encoding

ASSISTANT = "assistant"


async def chat_completions(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Answer a conversation, n times."""
    request = await serving.read(http, ChatRequest)
    job_id = new_id("chatcmpl-", http, request.request_id)
    params = await serving.params(request)
    return await _Chat(http, serving, request, job_id, params).send()


class _Choice:
    """Reads one choice. The message of a whole answer is made of the same fields as the deltas of a stream.

    Args:
        conversation: whose next turn the choice is.
    """

    def __init__(self, conversation: Conversation):
        self._prompt, self._reader = conversation.prompt, conversation.parser()
        request = conversation.request
        self._with_reasoning, self._is_stream = request.include_reasoning is not False, bool(request.stream)
        self.has_called = False

    def read(self, text: str, ended: str | None) -> dict[str, Any]:
        """The fields of a delta. Arguments as for `StreamParser.read`."""
        events = self._reader.read(text, ended)
        answer = answer_of(events)
        fields: dict[str, Any] = {"content": answer.text} if answer.text else {}
        if answer.reasoning and self._with_reasoning:
            fields |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        self.has_called |= bool(answer.calls)
        if calls := self._calls(events if self._is_stream else without_incomplete_calls(events)):
            fields["tool_calls"] = calls
        return fields

    def _calls(self, events: list[Event]) -> list[dict[str, Any]]:
        """The pieces of calls; those of one call are joined."""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if not isinstance(event, CallPiece):
                continue
            if event.name is not None:
                function = {"name": event.name, "arguments": ""}
                calls[event.index] = {"id": self._prompt.new_id(), "type": "function", "function": function}
            call = calls.setdefault(event.index, {"function": {"arguments": ""}})
            call["function"]["arguments"] += event.arguments
        return [{"index": index, **call} for index, call in calls.items()]


class _Chat(Conversation, ChoicesAnswer[ChatRequest]):
    kind, kind_of_chunks = "chat.completion", "chat.completion.chunk"
    plain = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"token_ids":null}'

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._choices: dict[int, _Choice] = {}  # of a stream, by their indices

    def encode(self) -> Encoding:
        encoded = yield from super().encode()
        self.is_parsed = not isinstance(self.parser(), PlainText)
        return encoded

    @property
    def role(self) -> str:
        """The role of the answer: the assistant's, or that of the last message if the answer continues it."""
        last = self.request.messages[-1].get("role")
        return ASSISTANT if self.request.add_generation_prompt or not isinstance(last, str) else last

    @cached_property
    def echo(self) -> str:
        """The text in front of the answer: with `echo`, the message that the answer continues."""
        last = self.request.messages[-1]
        if not self.request.echo or last.get("role") != self.role:
            return ""
        content = joined(last).get("content")
        return content if isinstance(content, str) else ""

    @property
    def num_copies(self) -> int:
        return 1

    @property
    def num_repeated(self) -> int:
        n, prompt = self.request.n or 1, len(self.prompt.text) if self.request.return_prompt_text else 0
        return (len(self.role) + len(self.echo)) * n + prompt * (n if self.request.stream else 1)

    def choice(self, number: int, output: RequestOutput, index: int, of_prompt: msgspec.Raw | None) -> dict[str, Any]:
        piece = self._piece(output, index, output.outputs[index], Progress())
        message: dict[str, Any] = {"role": self.role, "content": "", "refusal": None, "reasoning": None}
        message |= piece.pop("delta")
        message["content"] = self.echo + message["content"] or (None if "tool_calls" in message else "")
        for call in message.get("tool_calls", ()):
            del call["index"]  # which only streams have
        return {"index": index, "message": message, **piece}

    def _logprobs(self, prompt: list[int], progress: Progress, delta: CompletionOutput | Delta) -> dict[str, Any]:
        names = progress.names(self.serving.tokenizer, self.params, prompt, delta.token_ids, delta)
        num_top = self.request.top_logprobs or 0
        return self.shapes.chat(delta.token_ids, names, delta.logprobs or [], num_top, progress.last)

    def num_thought(self, outputs: Sequence[RequestOutput]) -> int:
        return sum(self.count_thought(one.token_ids) for output in outputs for one in output.outputs)

    def rest(self, output: RequestOutput, of_prompt: msgspec.Raw | None) -> dict[str, Any]:
        request = self.request
        return {
            "prompt_logprobs": of_prompt,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "prompt_text": self.prompt.text if request.return_prompt_text else None,
        }

    def beginning(self, job: Job) -> list[tuple[dict[str, Any], bytes]]:
        """The first chunks of every choice: the role, and with `echo` the text in front of the answer."""
        request = self.request
        token_ids = job.requests[0].prompt_token_ids if request.return_token_ids else None
        prompt = self.prompt.text if request.return_prompt_text else None
        of_prompt = b',"prompt_token_ids":' + encode(token_ids) + b',"prompt_text":' + encode(prompt)
        deltas = [({"role": self.role, "content": ""}, of_prompt)]
        if self.echo:
            deltas.append(({"content": self.echo}, b""))
        return [
            ({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}, rest)
            for delta, rest in deltas
            for i in range(request.n or 1)
        ]

    def _piece(
        self, source: Request | RequestOutput, index: int, delta: Delta | CompletionOutput, progress: Progress
    ) -> dict[str, Any]:
        """All that a delta says; a whole choice is one delta."""
        choice = self._choices.get(index) or self._choices.setdefault(index, _Choice(self))
        fields = choice.read(delta.text, delta.finish_reason) if self.is_parsed else {"content": delta.text}
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs(source.prompt_token_ids, progress, delta)
        token_ids = delta.token_ids if self.request.return_token_ids else None
        piece: dict[str, Any] = {"index": delta.index, "delta": fields, "logprobs": logprobs, "finish_reason": None}
        if delta.finish_reason is not None:
            reason = ended_by(delta.finish_reason, choice.has_called)
            piece |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
        return piece | {"token_ids": token_ids}

    def pieces(
        self, source: Request | RequestOutput, index: int, delta: Delta | CompletionOutput, progress: Progress
    ) -> list[dict[str, Any]]:
        piece = self._piece(source, index, delta, progress)
        if piece == {"index": delta.index, "delta": {}} | dict.fromkeys(("logprobs", "finish_reason", "token_ids")):
            return []
        if delta.finish_reason is None or "tool_calls" not in piece["delta"]:
            return [piece]
        # OpenAI's client looks for the end of a call before it takes the calls of the same chunk.
        calls = {name: value for name, value in piece.items() if name != "stop_reason"} | {"finish_reason": None}
        return [calls, piece | {"delta": {}, "logprobs": None, "token_ids": None}]
