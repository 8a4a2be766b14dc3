"""POST /v1/completions: one or more prompts, as text or as tokens, and what comes behind them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from nanoengine.aio.request_stream import Delta
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sequence import Request
from nanoengine.sampling.params import SamplingParams
from nanoengine.sampling.token_logprobs import TokenLogprobs
from nanoengine.server.answers import Answer, EventStream
from nanoengine.server.logprobs import Progress
from nanoengine.server.params import prompt_list
from nanoengine.server.protocol import CompletionRequest
from nanoengine.server.serving import Serving, new_id


async def completions(http: HTTPRequest) -> Response | EventStream:
    """Complete prompts; index i of the answer belongs to prompt i // n."""
    serving: Serving = http.app.state.serving
    request = await serving.read(http, CompletionRequest)
    prompts = prompt_list(request.prompt, "prompt", serving.config.max_prompts)
    params = await serving.params(
        request,
        max_tokens=1 if request.is_echo_only else 16 if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    answer = _Completions(serving, request, new_id("cmpl-", http, request.request_id), params)

    def tokens() -> tuple[list[list[int]], SamplingParams]:
        encoded = [
            serving.encode(prompt, request, add_special_tokens=request.add_special_tokens is not False)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        if request.echo and not request.return_token_ids:
            answer.echoes = [
                prompt if isinstance(prompt, str) else serving.tokenizer.decode(ids, skip_special_tokens=False)
                for prompt, ids in zip(prompts, encoded, strict=True)
            ]
        return encoded, params

    return await answer.send(http, len(prompts), tokens)


class _Completions(Answer[CompletionRequest]):
    kind = kind_of_chunks = "text_completion"
    plain = (
        b'{"index":%d,"text":',
        b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}',
    )

    def choice(self, number: int, output: RequestOutput, index: int) -> dict[str, Any]:
        request, completion = self.request, output.outputs[index]
        text = "" if request.is_echo_only else completion.text
        token_ids, entries = completion.token_ids, completion.logprobs
        logprobs = None
        if entries is not None:
            shown = [] if request.is_echo_only else token_ids
            logprobs = self._logprobs(output.prompt_token_ids, output.prompt_logprobs, shown, entries)
        return {
            "index": number * len(output.outputs) + index,
            "text": (self.echoes[number] if self.echoes else "") + text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": token_ids if request.return_token_ids else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "prompt_logprobs": self.prompt_logprobs(output),
        }

    def _logprobs(
        self,
        prompt: list[int],
        of_prompt: list[TokenLogprobs | None] | None,
        token_ids: list[int],
        entries: list[TokenLogprobs],
    ) -> dict[str, Any]:
        """Of a completion from its start, behind those of its prompt if that is repeated."""
        all_ids, all_entries = token_ids, list[TokenLogprobs | None](entries[: len(token_ids)])
        if self.request.echo:
            all_ids, all_entries = [*prompt, *token_ids], [*(of_prompt or ()), *all_entries]
        return self.shapes.completion(all_ids, all_entries, self.request.logprobs or 0)

    def pieces(self, own: Request, index: int, delta: Delta, progress: Progress) -> list[dict[str, Any]]:
        request, is_first = self.request, progress.num_tokens == 0
        text = "" if request.is_echo_only else delta.text
        if is_first and self.echoes:
            text = self.echoes[index // (request.n or 1)] + text
        logprobs = None
        if delta.logprobs is not None:
            token_ids = [] if request.is_echo_only else delta.token_ids
            if is_first and request.echo:
                logprobs = self._logprobs(own.prompt_token_ids, own.prompt_logprobs, token_ids, delta.logprobs)
            else:
                entries = delta.logprobs[: len(token_ids)]
                logprobs = self.shapes.completion(
                    token_ids, entries, request.logprobs or 0, progress.num_chars, progress.last
                )
            progress.num_chars += sum(map(len, logprobs["tokens"]))
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": own.prompt_token_ids if is_first and request.return_token_ids else None,
            "token_ids": delta.token_ids if request.return_token_ids else None,
        }
        return [choice]
