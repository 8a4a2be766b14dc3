"""ChoicesAnswer: the choices of /v1/completions and /v1/chat/completions, as whole JSON or as the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.responses import Response

from nanoengine.core.outputs import CompletionOutput, RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.features.sampling.params import SamplingParams
from nanoengine.serve.aio.request_stream import Delta
from nanoengine.serve.server.admission.answer_bytes import answer_bytes
from nanoengine.serve.server.admission.text_threads import run_to_end
from nanoengine.serve.server.apis.event_stream import DONE, EventStream, StreamFormat
from nanoengine.serve.server.apis.json_response import ChunkedJSONResponse, encode, in_pieces
from nanoengine.serve.server.apis.openai.logprobs import LogprobShapes, Progress
from nanoengine.serve.server.bodies.params import MANY
from nanoengine.serve.server.bodies.protocol import Generation
from nanoengine.serve.server.jobs import Job
from nanoengine.serve.server.served_model import FEW
from nanoengine.serve.server.submission import Submission

G = TypeVar("G", bound=Generation)

MANY_CHARS = 1 << 16
"""An answer that repeats more characters of its request is made in a thread for text."""

TOKENS_OF_A_STEP, CHOICES_OF_A_STEP = 128, 64
"""Tokens whose log probabilities are encoded in one piece, in some milliseconds; and choices with text alone."""


class ChoicesAnswer(Submission[G], StreamFormat):
    """An answer with a list of choices, as /v1/completions and /v1/chat/completions have it. Subclasses make the choices."""

    kind: ClassVar[str]
    kind_of_chunks: ClassVar[str]
    plain: ClassVar[tuple[bytes, bytes]]  # before and behind the text, in a chunk with text alone
    done = DONE
    is_parsed = False  # the text may hold thoughts and calls

    params: SamplingParams

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.created = int(time.time())
        self.num_prompt_tokens: list[int] = []
        self.echoes: list[str] = []  # text before the choices of each prompt; empty: none
        self.shapes = LogprobShapes(self.serving.token_texts, bool(self.request.return_tokens_as_token_ids))

    async def send(self) -> Response | EventStream:
        """Start a job for the prompts, and make its answer. Raises as `finish`."""
        serving, params = self.serving, self.params
        job = await (self.start() if self.request.stream else self.finish())
        self.num_prompt_tokens = [len(request.prompt_token_ids) for request in job.requests]
        if self.request.stream:
            return EventStream(serving.jobs, job, self.events(job), self)
        num_new = sum(seq.num_tokens - seq.num_prompt_tokens for request in job.requests for seq in request.sequences)
        is_long = len(job.requests) * params.num_sequences > FEW or self.num_repeated > MANY_CHARS or num_new > MANY
        with_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        body = self.body(job.requests)
        return ChunkedJSONResponse(await serving.text.finish(body) if is_long or with_logprobs else run_to_end(body))

    def size(self, requests: Sequence[Request]) -> int:
        max_model_len, copies = self.serving.max_model_len, self.num_copies
        return answer_bytes(requests, max_model_len, repeated=self.num_repeated, num_copies=copies)

    @property
    def num_copies(self) -> int:
        """The number of times that the answer repeats data of a prompt, such as its log probabilities."""
        return self.request.n or 1

    @property
    def num_repeated(self) -> int:
        """The number of characters of the request that the answer repeats."""
        return sum(map(len, self.echoes)) * (self.request.n or 1)

    def _head(self, kind: str) -> bytes:
        """The JSON of the answer or of a chunk, up to its choices."""
        model = self.serving.names.answered(self.request.model)
        common = {"id": self.job_id, "object": kind, "created": self.created, "model": model}
        return encode(common)[:-1] + b',"choices":['

    # ---- whole

    def body(self, requests: list[Request]) -> Generator[None, None, list[bytes]]:
        """Returns the whole answer as JSON in pieces; other clients may run between two of its steps."""
        outputs = [request.output() for request in requests]
        num_new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        pieces = [self._head(self.kind)]
        for number, output in enumerate(outputs):
            of_prompt = None
            if output.prompt_logprobs is not None:
                of_prompt = yield from self._prompt_logprobs(output)
            for index in range(len(output.outputs)):
                pieces += [encode(self.choice(number, output, index, of_prompt)), b","]
                if self.params.logprobs is not None or not len(pieces) % CHOICES_OF_A_STEP:
                    yield
        rest = {
            "service_tier": None,
            "system_fingerprint": self.serving.fingerprint,
            "usage": self.serving.usage(sum(self.num_prompt_tokens), num_new, num_cached, self.num_thought(outputs)),
            **self.rest(outputs[0], of_prompt),
        }
        pieces[-1] = b"]," + encode(rest)[1:]
        return pieces

    def choice(self, number: int, output: RequestOutput, index: int, of_prompt: msgspec.Raw | None) -> dict[str, Any]:
        """The JSON of one completion.

        Args:
            number: of the prompt.
            output: of the prompt.
            index: of the completion.
            of_prompt: log probabilities of the prompt.
        """
        raise NotImplementedError

    def num_thought(self, outputs: Sequence[RequestOutput]) -> int | None:
        """Tokens of all thoughts; None: no answer here has any."""
        return None

    def rest(self, output: RequestOutput, of_prompt: msgspec.Raw | None) -> dict[str, Any]:
        """More fields of the answer, beside its choices."""
        return {}

    def _prompt_logprobs(self, output: RequestOutput) -> Generator[None, None, msgspec.Raw]:
        entries = self.shapes.prompt(output.prompt_token_ids, output.prompt_logprobs or ())
        parts = []
        while some := list(islice(entries, TOKENS_OF_A_STEP)):
            parts.append(encode(some)[1:-1])
            yield
        return msgspec.Raw(b"[" + b",".join(parts) + b"]")

    # ---- in chunks

    async def events(self, job: Job) -> AsyncIterator[bytes]:
        """The chunks of a stream; those that are ready at the same time are one write."""
        serving, request, n = self.serving, self.request, self.request.n or 1
        chunks = Chunks(self._head(self.kind_of_chunks), serving.fingerprint)
        options = request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        each = with_usage and options is not None and bool(options.continuous_usage_stats)
        is_plain = self.params.logprobs is None and not request.return_token_ids and not self.is_parsed
        choices = [Progress() for _ in range(n * len(job.requests))]
        has_begun = False

        def plain(number: int, delta: Delta) -> bytes:
            """The chunk of a delta with text alone."""
            index = number * n + delta.index
            num_tokens = choices[index].num_tokens + len(delta.token_ids)
            usage = usage_json(self.num_prompt_tokens[number], num_tokens) if each else b""
            start, end = self.plain
            return chunks.chunk(start % index + encode(delta.text) + end, usage)

        def write_now(deltas: list[Delta]) -> bool:
            if any(delta.finish_reason is not None for delta in deltas):
                return False
            is_written = job.write_now(b"".join([plain(0, delta) for delta in deltas]))
            for delta in deltas if is_written else ():
                choices[delta.index].advance(delta.token_ids)
            return is_written

        async for news in job.deltas():
            parts = []
            if not has_begun:
                usage = usage_json(self.num_prompt_tokens[0], 0) if each else b""
                make_all = partial(self._first_chunks, chunks, usage)
                parts = await serving.make(make_all, job, slow=self.num_repeated > MANY_CHARS)
                has_begun = True
                if is_plain and not self.echoes:
                    job.take_now(partial(serving.work_share.charged, job.requests[0].client, write_now))
            for number, delta in news:
                index = number * n + delta.index
                progress = choices[index]
                is_first = not progress.num_tokens
                if is_plain and delta.finish_reason is None and not (is_first and self.echoes):
                    parts.append(plain(number, delta))
                    progress.advance(delta.token_ids)
                    continue
                make = partial(self._encoded, job.requests[number], index, delta)
                encoded = await serving.make(make, progress, slow=is_first and bool(request.echo))
                progress.advance(delta.token_ids)
                if not encoded:
                    continue
                usage = usage_json(self.num_prompt_tokens[number], progress.num_tokens) if each else b""
                parts += [chunks.chunk(choice, usage) for choice in encoded[:-1]]
                is_last = delta.finish_reason is not None and not with_usage
                parts.append(chunks.chunk(encoded[-1], usage + chunks.fingerprint if is_last else usage))
            for part in in_pieces(parts):
                yield part
        if with_usage:
            num_new = sum(progress.num_tokens for progress in choices)
            num_thought = self.num_thought([each.output() for each in job.requests])
            num_prompt = sum(self.num_prompt_tokens)
            total = serving.usage(num_prompt, num_new, job.num_cached_tokens, num_thought)
            yield chunks.chunk(b"", b',"usage":' + encode(total) + chunks.fingerprint)

    def _first_chunks(self, chunks: Chunks, usage: bytes, job: Job) -> list[bytes]:
        return [chunks.chunk(encode(choice), rest + usage) for choice, rest in self.beginning(job)]

    def _encoded(self, source: Request, index: int, delta: Delta, progress: Progress) -> list[bytes]:
        return [encode(piece) for piece in self.pieces(source, index, delta, progress)]

    def beginning(self, job: Job) -> list[tuple[dict[str, Any], bytes]]:
        """Chunks before the first delta: the choice of each, and the JSON of its other fields, from a comma on."""
        return []

    def pieces(
        self, source: Request | RequestOutput, index: int, delta: Delta | CompletionOutput, progress: Progress
    ) -> list[dict[str, Any]]:
        """The choices of the chunks of a delta; none if the parser still holds its text. `progress`: before the delta."""
        raise NotImplementedError


class Chunks:
    """Makes the events of one stream; the common fields of all chunks are encoded once.

    Args:
        head: the JSON of every chunk, up to its choices.
        fingerprint: of the server.

    Attributes:
        fingerprint: the JSON of the field that the last chunk has, from a comma on.
    """

    def __init__(self, head: bytes, fingerprint: str):
        self._head = b"data: " + head
        self.fingerprint = b',"system_fingerprint":' + encode(fingerprint)

    def chunk(self, choice: bytes, rest: bytes = b"") -> bytes:
        """One event: a choice, and the other fields of the chunk, from a comma on."""
        return b"".join((self._head, choice, b"]", rest, b"}\n\n"))


def usage_json(num_prompt: int, num_completion: int) -> bytes:
    """The field `usage` of a chunk, from a comma on."""
    return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
        num_prompt,
        num_prompt + num_completion,
        num_completion,
    )
