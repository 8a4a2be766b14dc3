"""Writer: an answer as the events or the body of an interface that is translated to and from /v1/chat/completions.

An interface makes a `ChatRequest` from the request of its client, and a `Writer` makes the shapes of its answer. Chat completions
have no `Writer`: with `n` choices, log probabilities and token ids they have the code of completions (`ChoicesAnswer`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.outputs import RequestOutput
from nanoengine.features.tool_calls.answer_parser import Call, CallPiece, Event
from nanoengine.features.tool_calls.call_emitter import without_incomplete_calls
from nanoengine.features.tool_calls.prompt import Prompt
from nanoengine.serve.server.apis.conversation import Conversation, ended_by
from nanoengine.serve.server.apis.event_stream import EventStream, StreamFormat
from nanoengine.serve.server.apis.json_response import encode, json_response
from nanoengine.serve.server.bodies.params import MANY
from nanoengine.serve.server.bodies.protocol import ChatRequest, Table
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens: of the prompt, of its part that was in the prefix cache, of the answer, and of the thought in it."""

    prompt: int
    cached: int = 0
    new: int = 0
    thought: int = 0


class Writer(StreamFormat):
    """Makes the events of a stream, in the shape of one interface. The same calls make the whole answer (`body`), so both agree.

    An answer is a list of blocks: texts, thoughts and calls; a whole answer has whole calls. Subclasses say what it means to
    open a block, to add text to it and to close it. Every method returns the events of the stream; there may be none.
    """

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

    def body(self) -> Table:
        """The whole answer."""
        raise NotImplementedError


async def reply(
    http: HTTPRequest, serving: ServedModel, request: ChatRequest, job_id: str, writer: Writer, text: str | None = None
) -> Response | EventStream:
    """Answer a conversation, or go on with a text, in the shape of a writer. Raises as `Submission.finish`."""
    request.check()
    if request.max_tokens is not None:  # their clients send the most that some other model can say
        request.max_tokens = min(request.max_tokens, serving.max_model_len)
    params = await serving.params(request)
    conversation = Conversation(http, serving, request, job_id, params)
    conversation.text = text
    job = await (conversation.start() if request.stream else conversation.finish())
    writer.prompt = conversation.prompt
    if request.stream:
        events = _stream(job, writer, conversation)
        return EventStream(serving.jobs, job, events, writer)
    output = job.requests[0].output()
    num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)  # a response repeats the request
    whole = partial(_whole, writer, conversation)
    return await serving.make(whole, output, slow=num_tokens > MANY)


def _whole(writer: Writer, conversation: Conversation, output: RequestOutput) -> Response:
    completion, num_prompt = output.outputs[0], len(output.prompt_token_ids)
    num_new, num_thought = len(completion.token_ids), conversation.count_thought(completion.token_ids)
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
                usage = Usage(num_prompt, job.num_cached_tokens, len(tokens), conversation.count_thought(tokens))
                events += _ended(writer, delta.finish_reason, delta.stop_reason, usage, job.problem)
        if events:
            yield b"".join(map(writer.write, events))


def _ended(
    writer: Writer, reason: str | None, stop: str | int | None, usage: Usage, problem: APIError | None = None
) -> Iterator[Table]:
    if reason == "abort":
        raise problem or APIError(503, "the answer was ended by abort_requests before it was whole")
    yield from writer.close_last()
    yield from writer.end(ended_by(reason, writer.has_called), stop, usage)
