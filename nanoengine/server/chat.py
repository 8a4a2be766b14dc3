"""POST /v1/chat/completions: a conversation, in the model's chat template, and what the model says next."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.aio.request_stream import Delta
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.sampling.params import SamplingParams
from nanoengine.server.answers import Answer, EventStream, encode
from nanoengine.server.jobs import Job
from nanoengine.server.logprobs import Progress
from nanoengine.server.protocol import ChatRequest
from nanoengine.server.serving import Serving, new_id
from nanoengine.server.text import joined
from nanoengine.tools.chats import Prompt
from nanoengine.tools.chats import said as said_by
from nanoengine.tools.parser import AnswerParser, Call, Text

ASSISTANT = "assistant"


async def chat_completions(http: HTTPRequest) -> Response | EventStream:
    """Answer a conversation, n times."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, ChatRequest)
    by_new_name = request.max_completion_tokens is not None
    params = await serving.params(
        request,
        max_tokens=request.max_completion_tokens if by_new_name else request.max_tokens,
        names={"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens" if by_new_name else "max_tokens"},
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    answer = _Chat(serving, request, new_id("chatcmpl", http, request.request_id), params)

    def tokens() -> tuple[list[list[int]], SamplingParams]:
        answer.prompt = prompt = serving.prompt(request)
        answer.is_parsed = prompt.parser() is not None
        serving.check_length(prompt.text, request)
        token_ids = serving.chat_encoder.encode(prompt.text, add_special_tokens=bool(request.add_special_tokens))
        return [token_ids], prompt.params(params)

    return await answer.send(http, 1, tokens)


class _Chat(Answer[ChatRequest]):
    kind, kind_of_chunks = "chat.completion", "chat.completion.chunk"
    plain = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"token_ids":null}'
    prompt: Prompt

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._parsers: dict[int, AnswerParser] = {}  # by choice, of streams
        self._has_called: set[int] = set()

    @property
    def role(self) -> str:
        """Of the answer; one that goes on with the last message has that message's."""
        last = self.request.messages[-1].get("role")
        return ASSISTANT if self.request.add_generation_prompt or not isinstance(last, str) else last

    @property
    def echo(self) -> str:
        """What is repeated before the answer: the message that it goes on with."""
        last = joined(self.request.messages[-1])
        content = last.get("content")
        return content if self.request.echo and last.get("role") == self.role and isinstance(content, str) else ""

    @property
    def num_copies(self) -> int:
        return 1

    @property
    def num_repeated(self) -> int:
        n, prompt = self.request.n or 1, len(self.prompt.text) if self.request.return_prompt_text else 0
        return (len(self.role) + len(self.echo)) * n + prompt * (n if self.request.stream else 1)

    def choice(self, number: int, output: RequestOutput, index: int) -> dict[str, Any]:
        request, completion = self.request, output.outputs[index]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self.shapes.chat(completion.token_ids, completion.logprobs, request.top_logprobs or 0)
        parser = self._parser()
        said = said_by([Text(completion.text)] if parser is None else [*parser.push(completion.text), *parser.finish()])
        content = self.echo + said.text
        reasoning = said.reasoning if said.reasoning and request.include_reasoning is not False else None
        message: dict[str, Any] = {
            "role": self.role,
            "content": content if content or not said.calls else None,
            "refusal": None,
            "reasoning": reasoning,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if said.calls:
            message["tool_calls"] = [self._call(call) for call in said.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _reason(completion.finish_reason, bool(said.calls)),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if request.return_token_ids else None,
        }

    def _parser(self) -> AnswerParser | None:
        return self.prompt.parser(skip_special_tokens=self.params.skip_special_tokens)

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self.prompt.new_id(), "type": "function", "function": function}

    def rest(self, output: RequestOutput) -> dict[str, Any]:
        request = self.request
        return {
            "prompt_logprobs": self.prompt_logprobs(output),
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "prompt_text": self.prompt.text if request.return_prompt_text else None,
        }

    def beginning(self, job: Job) -> list[tuple[dict[str, Any], bytes]]:
        """Who speaks, and what is repeated, of every choice."""
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

    def pieces(self, own: Request, index: int, delta: Delta, progress: Progress) -> list[dict[str, Any]]:
        request = self.request
        said = {"content": delta.text} if not self.is_parsed else self._said(index, delta)
        if not said and delta.finish_reason is None and delta.logprobs is None and not request.return_token_ids:
            return []
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self.shapes.chat(delta.token_ids, delta.logprobs, request.top_logprobs or 0, progress.last)
        choice = {
            "index": delta.index,
            "delta": said,
            "logprobs": logprobs,
            "finish_reason": None,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
        if delta.finish_reason is None:
            return [choice]
        reason = _reason(delta.finish_reason, index in self._has_called)
        end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
        if "tool_calls" not in said:
            return [choice | end]
        # OpenAI's client looks for the end of a call before it takes the calls of the same chunk.
        return [choice, choice | end | {"delta": {}, "logprobs": None, "token_ids": None}]

    def _said(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a delta has told of a choice: each call comes in one piece."""
        if (parser := self._parsers.get(index)) is None:
            parser = self._parser()
            assert parser is not None
            self._parsers[index] = parser
        said = said_by([*parser.push(delta.text), *(parser.finish() if delta.finish_reason is not None else ())])
        found: dict[str, Any] = {"content": said.text} if said.text else {}
        if said.reasoning and self.request.include_reasoning is not False:
            found |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
        if said.calls:
            self._has_called.add(index)
            found["tool_calls"] = [{"index": call.index, **self._call(call)} for call in said.calls]
        return found


def _reason(reason: str | None, has_called: bool) -> str | None:
    """Why an answer ended: that of one with calls is that they are called."""
    return "tool_calls" if has_called and reason == "stop" else reason
