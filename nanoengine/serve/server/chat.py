"""POST /v1/chat/completions: the next turn of a conversation, which is rendered by the model's chat template."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.outputs import CompletionOutput, RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.models.tools.chats import answer_of
from nanoengine.models.tools.parser import Call, PlainText
from nanoengine.serve.aio.request_stream import Delta
from nanoengine.serve.server.answers import ChoicesAnswer, EventStream, encode
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.logprobs import Progress
from nanoengine.serve.server.protocol import ChatRequest
from nanoengine.serve.server.replies import Conversation, ended_by
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.serving import Encoding, Serving
from nanoengine.serve.server.text import joined

ASSISTANT = "assistant"


async def chat_completions(http: HTTPRequest, serving: Serving) -> Response | EventStream:
    """Answer a conversation, n times."""
    request = await serving.read(http, ChatRequest)
    conversation = await Conversation.of(serving, request)
    answer = _Chat(serving, request, new_id("chatcmpl-", http, request.request_id), conversation.params)
    answer.conversation = conversation

    def tokens() -> Encoding:
        found = yield from conversation.tokens()
        answer.is_parsed = not isinstance(conversation.parser(), PlainText)
        return found

    return await answer.send(http, 1, tokens)


class _Choice:
    """Reads one choice. The message of a whole answer is made of the same fields as the deltas of a stream.

    Args:
        conversation: whose next turn the choice is.
    """

    def __init__(self, conversation: Conversation):
        self._prompt, self._reader = conversation.prompt, conversation.parser()
        self._with_reasoning = conversation.request.include_reasoning is not False
        self.has_called = False

    def read(self, text: str, ended: str | None) -> dict[str, Any]:
        """The fields of a delta; each call comes in one piece. Arguments as for `Reading.read`."""
        said = answer_of(self._reader.read(text, ended))
        found: dict[str, Any] = {"content": said.text} if said.text else {}
        if said.reasoning and self._with_reasoning:
            found |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        if said.calls:
            self.has_called = True
            found["tool_calls"] = [{"index": own.index, **self._call(own)} for own in said.calls]
        return found

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._prompt.new_id(), "type": "function", "function": function}


class _Chat(ChoicesAnswer[ChatRequest]):
    kind, kind_of_chunks = "chat.completion", "chat.completion.chunk"
    plain = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"token_ids":null}'
    conversation: Conversation

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._choices: dict[int, _Choice] = {}  # of a stream, by their indices

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
        n, prompt = self.request.n or 1, len(self.conversation.prompt.text) if self.request.return_prompt_text else 0
        return (len(self.role) + len(self.echo)) * n + prompt * (n if self.request.stream else 1)

    def choice(self, number: int, output: RequestOutput, index: int, told: msgspec.Raw | None) -> dict[str, Any]:
        request, completion = self.request, output.outputs[index]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self._logprobs(output.prompt_token_ids, Progress(), completion)
        read = _Choice(self.conversation)
        message: dict[str, Any] = {"role": self.role, "content": "", "refusal": None, "reasoning": None}
        message |= read.read(completion.text, completion.finish_reason or "stop")
        message["content"] = self.echo + message["content"] or (None if read.has_called else "")
        for call in message.get("tool_calls", ()):
            del call["index"]  # which only streams have
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": ended_by(completion.finish_reason, read.has_called),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if request.return_token_ids else None,
        }

    def _logprobs(self, prompt: list[int], progress: Progress, told: CompletionOutput | Delta) -> dict[str, Any]:
        names = progress.names(self.serving.tokenizer, self.params, prompt, told.token_ids, told)
        num_top = self.request.top_logprobs or 0
        return self.shapes.chat(told.token_ids, names, told.logprobs or [], num_top, progress.last)

    def rest(self, output: RequestOutput, told: msgspec.Raw | None) -> dict[str, Any]:
        request = self.request
        return {
            "prompt_logprobs": told,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "prompt_text": self.conversation.prompt.text if request.return_prompt_text else None,
        }

    def beginning(self, job: Job) -> list[tuple[dict[str, Any], bytes]]:
        """Of every choice: the role, and with `echo` the text in front of the answer."""
        request = self.request
        token_ids = job.requests[0].prompt_token_ids if request.return_token_ids else None
        prompt = self.conversation.prompt.text if request.return_prompt_text else None
        of_prompt = b',"prompt_token_ids":' + encode(token_ids) + b',"prompt_text":' + encode(prompt)
        deltas = [({"role": self.role, "content": ""}, of_prompt)]
        if self.echo:
            deltas.append(({"content": self.echo}, b""))
        return [
            ({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}, rest)
            for delta, rest in deltas
            for i in range(request.n or 1)
        ]

    def pieces(self, own: Request, index: int, delta: Delta, progress: Progress) -> list[dict[str, Any]]:
        request = self.request
        choice = self._choices.get(index) or self._choices.setdefault(index, _Choice(self.conversation))
        said = choice.read(delta.text, delta.finish_reason) if self.is_parsed else {"content": delta.text}
        if not said and delta.finish_reason is None and delta.logprobs is None and not request.return_token_ids:
            return []
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self._logprobs(own.prompt_token_ids, progress, delta)
        piece = {
            "index": delta.index,
            "delta": said,
            "logprobs": logprobs,
            "finish_reason": None,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
        if delta.finish_reason is None:
            return [piece]
        reason = ended_by(delta.finish_reason, choice.has_called)
        end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
        if "tool_calls" not in said:
            return [piece | end]
        # OpenAI's client looks for the end of a call before it takes the calls of the same chunk.
        return [piece, piece | end | {"delta": {}, "logprobs": None, "token_ids": None}]
