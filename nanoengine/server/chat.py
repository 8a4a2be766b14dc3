"""POST /v1/chat/completions: a conversation, in the model's chat template, and what the model says next."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.aio.request_stream import Delta
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.server.answers import Answer, EventStream, encode
from nanoengine.server.jobs import Job
from nanoengine.server.logprobs import Progress
from nanoengine.server.protocol import ChatRequest
from nanoengine.server.serving import Serving, new_id
from nanoengine.server.text import joined

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

    def tokens() -> list[list[int]]:
        answer.prompt = serving.render(request)
        serving.check_length(answer.prompt, request)
        return [serving.chats.encode(answer.prompt, add_special_tokens=bool(request.add_special_tokens))]

    return await answer.send(http, 1, tokens)


class _Chat(Answer[ChatRequest]):
    kind, kind_of_chunks = "chat.completion", "chat.completion.chunk"
    plain = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"token_ids":null}'
    prompt = ""  # as rendered

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

    def choice(self, number: int, output: RequestOutput, index: int) -> dict[str, Any]:
        request, completion = self.request, output.outputs[index]
        logprobs = None
        if completion.logprobs is not None:
            logprobs = self.shapes.chat(completion.token_ids, completion.logprobs, request.top_logprobs or 0)
        return {
            "index": index,
            "message": {"role": self.role, "content": self.echo + completion.text, "refusal": None, "reasoning": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if request.return_token_ids else None,
        }

    def rest(self, output: RequestOutput) -> dict[str, Any]:
        request = self.request
        return {
            "prompt_logprobs": self.prompt_logprobs(output),
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "prompt_text": self.prompt if request.return_prompt_text else None,
        }

    def beginning(self, job: Job) -> list[tuple[dict[str, Any], bytes]]:
        """Who speaks, and what is repeated, of every choice."""
        request = self.request
        token_ids = job.requests[0].prompt_token_ids if request.return_token_ids else None
        prompt = self.prompt if request.return_prompt_text else None
        of_prompt = b',"prompt_token_ids":' + encode(token_ids) + b',"prompt_text":' + encode(prompt)
        deltas = [({"role": self.role, "content": ""}, of_prompt)]
        if self.echo:
            deltas.append(({"content": self.echo}, b""))
        return [
            ({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}, rest)
            for delta, rest in deltas
            for i in range(request.n or 1)
        ]

    def piece(self, own: Request, index: int, delta: Delta, progress: Progress) -> dict[str, Any]:
        request = self.request
        logprobs = None
        if delta.logprobs is not None:
            logprobs = self.shapes.chat(delta.token_ids, delta.logprobs, request.top_logprobs or 0, progress.last)
        choice = {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
        return choice if delta.finish_reason is None else choice | {"stop_reason": delta.stop_reason}
