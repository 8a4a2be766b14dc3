"""Replies: the next turn of a conversation, for interfaces that are translated to and from /v1/chat/completions.

An interface makes a `ChatRequest` from the request of its client, and a `Writer` makes the shapes of its answer. Chat completions
have no `Writer`: with `n` choices, log probabilities and token ids they share the code of completions (`ChoicesAnswer`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.outputs import RequestOutput
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.features.tool_calls.call_events import without_incomplete_calls
from nanoengine.features.tool_calls.parser import Call, CallPiece, Event, StreamParser
from nanoengine.features.tool_calls.prompt import Prompt, plain_prompt
from nanoengine.serve.server.answer_bytes import answer_bytes
from nanoengine.serve.server.answers import COMMENT, EventStream, encode, json_response
from nanoengine.serve.server.errors import Problem
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.params import MANY
from nanoengine.serve.server.prompts import CHARS_OF_A_STEP
from nanoengine.serve.server.protocol import ChatRequest, Table
from nanoengine.serve.server.serving import Encoding, Serving
from nanoengine.serve.server.text import CURRENT_CLIENT
from nanoengine.serve.server.thinking import thinking_wish


class Conversation:
    """A conversation, and how its next turn is sampled and read.

    Args:
        serving: the served model.
        request: the conversation, and how it is sampled.
        params: sampling parameters before the prompt is known.
        text: the prompt; None: it is rendered from the messages.
    """

    prompt: Prompt  # set by `tokens`

    def __init__(self, serving: Serving, request: ChatRequest, params: SamplingParams, text: str | None = None):
        self.serving, self.request, self.params, self.text = serving, request, params, text
        self._client = CURRENT_CLIENT.get()

    @classmethod
    async def of(
        cls,
        serving: Serving,
        request: ChatRequest,
        names: Mapping[str, str] = MappingProxyType({}),
        text: str | None = None,
    ) -> Conversation:
        """Check the sampling parameters of a request. Arguments and errors as for `sampling_params`."""
        by_new_name = request.max_completion_tokens is not None
        params = await serving.params(
            request,
            max_tokens=request.max_completion_tokens if by_new_name else request.max_tokens,
            names={
                "logprobs": "top_logprobs",
                "max_tokens": "max_completion_tokens" if by_new_name else "max_tokens",
                **names,
            },
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        if (budget := thinking_wish(request)[1]) is not None:
            params = dataclasses.replace(params, thinking_budget=budget)
        return cls(serving, request, params, text)

    def tokens(self) -> Encoding:
        """The token ids of the prompt, and the final sampling parameters; see `Serving.start`."""
        serving, request = self.serving, self.request
        self.prompt = prompt = serving.prompts.of_chat(request) if self.text is None else plain_prompt(self.text)
        serving.prompts.check_length(prompt.text, request)
        if len(prompt.text) > CHARS_OF_A_STEP:
            yield
        own = {"client": self._client, "salt": request.cache_salt or ""}
        special = bool(request.add_special_tokens)
        token_ids = serving.prompts.chat_encoder.encode(prompt.text, **own, add_special_tokens=special)
        return [token_ids], prompt.params(self.params)

    def num_thought(self, token_ids: list[int]) -> int:
        """Tokens of a whole answer that are its thought."""
        thought = self.prompt.thought
        return 0 if thought is None else thought.count(token_ids, self.serving.tokenizer.decode)

    def parser(self) -> StreamParser:
        """For one answer."""
        return self.prompt.parser(skip_special_tokens=self.params.skip_special_tokens)


def ended_by(reason: str | None, has_called: bool) -> str | None:
    """The finish reason for clients: "tool_calls" for an answer with calls that ended by itself."""
    return "tool_calls" if has_called and reason == "stop" else reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens: of the prompt, of its part that was in the prefix cache, of the answer, and of the thought in it."""

    prompt: int
    cached: int = 0
    new: int = 0
    thought: int = 0


class Writer:
    """Makes the events of a stream, in the shape of one interface. The same calls make the whole answer (`body`), so both agree.

    An answer is a list of blocks: texts, thoughts and calls; a whole answer has whole calls. Subclasses say what it means to
    open a block, to add text to it and to close it. Every method returns the events of the stream; there may be none.
    """

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"
    ping: ClassVar[bytes] = COMMENT
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names of the interface for fields of `SamplingParams`, for errors."""

    def __init__(self) -> None:
        self.ttft: float | None = None  # seconds to the first token; None: they are measured here
        self._start = time.monotonic()
        self._first = 0.0  # the time of the first text
        self._kind: type[Event] | None = None  # of the open block
        self._num_blocks = 0
        self.has_called = False
        self.prompt: Prompt

    def write(self, event: Table) -> bytes:
        """The bytes of an event in a stream."""
        return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"

    def say(self, events: Iterable[Event]) -> Iterator[Table]:
        """The next part of the answer: blocks are opened and closed where its kind changes."""
        for event in events:
            if isinstance(event, Call):
                self.has_called = True
                yield from self.called(event)
                yield from self.close_last()
                continue
            text = event.arguments if isinstance(event, CallPiece) else event.text
            begins_call = isinstance(event, CallPiece) and event.name is not None
            if self._kind is not None and (begins_call or self._kind is not type(event)):
                yield from self.close_last()
            if self._kind is None:
                if self._num_blocks and not begins_call:
                    text = text.lstrip()  # white space between two blocks is of neither
                if not text and not begins_call:
                    continue
                self._num_blocks += 1
                self._first = self._first or time.monotonic()
                self._kind = type(event)
                yield from self.open(event)
            if text:
                yield from self.add(text)

    def seconds(self) -> tuple[float, float]:
        """From the request to its first token, and from there until now."""
        now = time.monotonic()
        first = self._first or now if self.ttft is None else self._start + self.ttft
        return first - self._start, now - first

    def close_last(self) -> Iterator[Table]:
        if self._kind is not None:
            yield from self.close()
        self._kind = None

    def begin(self, usage: Usage) -> Iterable[Table]:
        """The prompt is in the engine."""
        return ()

    def open(self, event: Event) -> Iterable[Table]:
        """A block begins; its text comes by `add`."""
        return ()

    def add(self, text: str) -> Iterable[Table]:
        """Text of the open block; of a call, its arguments."""
        raise NotImplementedError

    def called(self, call: Call) -> Iterable[Table]:
        """The open block is this call, and it is whole. A block of a call that broke, or was cut off, is closed without."""
        return ()

    def close(self) -> Iterable[Table]:
        """The open block ends."""
        return ()

    def end(self, reason: str | None, stop: str | int | None, usage: Usage) -> Iterable[Table]:
        """The answer ends, for the reasons that `CompletionOutput` has, or "tool_calls"."""
        raise NotImplementedError

    def failed(self, problem: Problem) -> bytes:
        """The last bytes of a stream that an error ends."""
        raise NotImplementedError

    def body(self) -> Table:
        """The whole answer."""
        raise NotImplementedError


async def reply(
    http: HTTPRequest,
    serving: Serving,
    request: ChatRequest,
    job_id: str,
    writer: Writer,
    text: str | None = None,
) -> Response | EventStream:
    """Answer a conversation, or go on with a text, in the shape of a writer. Raises as `Serving.start` and `Job.end`."""
    request.check()
    if request.max_tokens is not None:  # their clients send the most that some other model can say
        request.max_tokens = min(request.max_tokens, serving.max_model_len)
    conversation = await Conversation.of(serving, request, writer.names, text)
    size = partial(answer_bytes, max_model_len=serving.max_model_len)
    job = await serving.start(http, job_id, request, conversation.params, 1, conversation.tokens, size)
    writer.prompt = conversation.prompt
    if request.stream:
        events = _stream(job, writer, conversation)
        return EventStream(
            serving,
            job,
            events,
            failed=writer.failed,
            done=b"",
            ping=writer.ping,
            media_type=writer.media_type,
        )
    async with serving.jobs.running(job, http.receive, serving.config.request_timeout):
        await job.end()
    output = job.requests[0].output()
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)  # a response repeats what was asked
    whole = partial(_whole, writer, conversation)
    return await serving.make(whole, output, slow=num_tokens > MANY)


def _whole(writer: Writer, conversation: Conversation, output: RequestOutput) -> Response:
    completion, num_prompt = output.outputs[0], len(output.prompt_token_ids)
    num_new, num_thought = len(completion.token_ids), conversation.num_thought(completion.token_ids)
    usage, reader = Usage(num_prompt, output.num_cached_tokens, num_new, num_thought), conversation.parser()
    writer.ttft = getattr(output.metrics, "ttft", None)
    list(writer.begin(Usage(num_prompt)))
    list(writer.say(without_incomplete_calls(reader.read(completion.text, completion.finish_reason or "stop"))))
    list(_ended(writer, completion.finish_reason, completion.stop_reason, usage))
    return json_response(writer.body())


async def _stream(job: Job, writer: Writer, conversation: Conversation) -> AsyncIterator[bytes]:
    num_prompt, reader, tokens = len(job.requests[0].prompt_token_ids), conversation.parser(), list[int]()
    yield b"".join(map(writer.write, writer.begin(Usage(num_prompt))))
    async for news in job.deltas():
        events: list[Table] = []
        for _, delta in news:
            tokens += delta.token_ids
            is_last = delta.finish_reason is not None
            events += writer.say(reader.read(delta.text, delta.finish_reason))
            if is_last:
                usage = Usage(num_prompt, job.num_cached_tokens, len(tokens), conversation.num_thought(tokens))
                events += _ended(writer, delta.finish_reason, delta.stop_reason, usage, job.problem)
        if events:
            yield b"".join(map(writer.write, events))


def _ended(
    writer: Writer, reason: str | None, stop: str | int | None, usage: Usage, problem: Problem | None = None
) -> Iterator[Table]:
    if reason == "abort":
        raise problem or Problem(503, "the answer was ended by abort_requests before it was whole")
    yield from writer.close_last()
    yield from writer.end(ended_by(reason, writer.has_called), stop, usage)


# ---- messages of a `ChatRequest`


def merge_system_messages(messages: list[Table]) -> list[Table]:
    """Messages with at most one system message, at the beginning: many chat templates take no other.

    System messages at the beginning become one. A later one, as agents send it, is added to the user's message before it.
    """
    found: list[Table] = []
    parts: list[Table] | None = None  # the content of the last one, where it is a list of our own
    for message in messages:
        is_system = message["role"] in ("system", "developer")
        last = found[-1] if found else None
        if last is None or not is_system or last["role"] not in ("system", "user"):
            role = "system" if last is None and is_system else "user" if is_system else message["role"]
            found.append({**message, "role": role})
            parts = None
            continue
        if parts is None:
            parts = last["content"] = [*parts_of(last["content"])]
        parts += parts_of(message["content"])
    return found


def parts_of(content: str | list[Table]) -> list[Table]:
    """The parts of a content."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(table: Table, name: str, where: str, param: str) -> str:
    """A field of a part of a message, which must be a text. `where`: the part, as clients call it. `param`: their field of it."""
    value = table.get(name)
    if not isinstance(value, str):
        raise Problem(400, f"{where}.{name} must be a text", param)
    return value


def unsupported(what: str, kind: Any, where: str, param: str) -> Problem:
    """The refusal of blocks, items or parts of a kind. Arguments as for `text_of`."""
    return Problem(400, f"{where}: {what} of type {str(kind)[:80]!r} are not supported: this model takes text", param)


def json_schema(schema: Any) -> Table:
    """The `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def assistant_message(text: str | None, calls: list[Table], reasoning: str = "") -> Table:
    """A message of the model."""
    message: Table = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def tool_call(call_id: str, name: str, arguments: Any) -> Table:
    """A call in a message of the model; arguments are JSON text, or a table."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_table(name: str, description: str | None, parameters: Table | None, strict: bool | None = None) -> Table:
    """A tool, as /v1/chat/completions has it."""
    own: Table = {"name": name}
    for key, value in (("description", description), ("parameters", parameters), ("strict", strict)):
        if value is not None:
            own[key] = value
    return {"type": "function", "function": own}


def choice_of(name: str) -> Table:
    """The `tool_choice` of one function."""
    return {"type": "function", "function": {"name": name}}
