"""POST /v1/completions: completions of one or more prompts, as text or as token ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.core.outputs import CompletionOutput, RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.features.sampling.stop_detokenizer import StopDetokenizer
from nanoengine.features.sampling.token_logprobs import TokenLogprobs
from nanoengine.serve.aio.request_stream import Delta
from nanoengine.serve.server.apis.event_stream import EventStream
from nanoengine.serve.server.apis.openai.choices import ChoicesAnswer
from nanoengine.serve.server.apis.openai.logprobs import Progress, names_of
from nanoengine.serve.server.bodies.params import prompt_list
from nanoengine.serve.server.bodies.protocol import CompletionRequest
from nanoengine.serve.server.errors import APIError
from nanoengine.serve.server.scope import new_id
from nanoengine.serve.server.served_model import ServedModel
from nanoengine.serve.server.submission import Encoding


async def completions(http: HTTPRequest, serving: ServedModel) -> Response | EventStream:
    """Complete prompts; index i of the answer belongs to prompt i // n."""
    request, prompts = await serving.read_as(http, CompletionRequest, partial(_prompts, serving))
    params = await serving.params(request)
    answer = _Completions(http, serving, request, new_id("cmpl-", http, request.request_id), params)
    answer.prompts = prompts
    return await answer.send()


def _prompts(serving: ServedModel, request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request. With a suffix each is a prompt to fill in the middle, which special tokens of the
    model end.
    """
    prompts = prompt_list(request.prompt, "prompt", serving.config.max_prompts)
    if not request.suffix:
        return prompts
    marks, suffix = serving.prompts.fill_tokens, request.suffix
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise APIError(400, "prompt has token ids, and suffix is text: give the prompt as text, too", "suffix")
    request.stop_token_ids = [*(request.stop_token_ids or ()), *marks.ends]
    return [marks.prompt(text, suffix) for text in texts]


class _Completions(ChoicesAnswer[CompletionRequest]):
    kind = kind_of_chunks = "text_completion"
    plain = (
        b'{"index":%d,"text":',
        b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}',
    )

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._names: dict[int, list[str]] = {}  # texts of the tokens of each repeated prompt

    def encode(self) -> Encoding:
        encoded, params = yield from super().encode()
        if self.request.echo and not self.request.return_token_ids:
            decode = partial(self.serving.tokenizer.decode, skip_special_tokens=False)
            pairs = zip(self.prompts, encoded, strict=True)
            self.echoes = [prompt if isinstance(prompt, str) else decode(ids) for prompt, ids in pairs]
        return encoded, params

    def choice(self, number: int, output: RequestOutput, index: int, of_prompt: msgspec.Raw | None) -> dict[str, Any]:
        [piece] = self.pieces(output, number * len(output.outputs) + index, output.outputs[index], Progress())
        return piece | {"prompt_logprobs": of_prompt}

    def _logprobs(
        self, number: int, request: Request | RequestOutput, progress: Progress, delta: CompletionOutput | Delta
    ) -> dict[str, Any]:
        """Log probabilities of the next tokens; with `echo`, those of the prompt in front of the first ones."""
        prompt, token_ids = request.prompt_token_ids, [] if self.request.is_echo_only else delta.token_ids
        names = progress.names(self.serving.tokenizer, self.params, prompt, token_ids, delta)
        before, entries = progress.last, list[TokenLogprobs | None]((delta.logprobs or [])[: len(token_ids)])
        if self.request.echo and not progress.num_tokens:
            before, token_ids, names = [], [*prompt, *token_ids], self._names_of_prompt(number, prompt) + names
            entries = [*(request.prompt_logprobs or ()), *entries]
        offset, progress.num_chars = progress.num_chars, progress.num_chars + sum(map(len, names))
        return self.shapes.completion(token_ids, names, entries, self.request.logprobs or 0, offset, before)

    def _names_of_prompt(self, number: int, token_ids: list[int]) -> list[str]:
        """The text of each token of a prompt; from now on, the repeated prompt is these texts joined."""
        if not self.echoes:
            return [""] * len(token_ids)
        if number in self._names:
            return self._names[number]
        prompt, tokenizer, special = self.prompts[number], self.serving.tokenizer, self.request.add_special_tokens
        names = tokenizer.split(prompt, special is not False) if isinstance(prompt, str) else []
        if len(names) != len(token_ids):  # it was cut, or came as tokens
            names = names_of(StopDetokenizer(partial(tokenizer.decode, skip_special_tokens=False)), token_ids, True)
        self._names[number], self.echoes[number] = names, "".join(names)
        return names

    def pieces(
        self, source: Request | RequestOutput, index: int, delta: Delta | CompletionOutput, progress: Progress
    ) -> list[dict[str, Any]]:
        request, is_first = self.request, progress.num_tokens == 0
        text, number = "" if request.is_echo_only else delta.text, index // (request.n or 1)
        logprobs = None if delta.logprobs is None else self._logprobs(number, source, progress, delta)
        if is_first and self.echoes:
            text = self.echoes[number] + text
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": source.prompt_token_ids if is_first and request.return_token_ids else None,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
        return [choice]
