"""LLM: the front door. It runs an engine until its callers have what they asked for, and shows progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from nanoengine.builder import build_engine
from nanoengine.config import EngineConfig
from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.kv.events import KVEvent
from nanoengine.engine.kv.statistics import CacheStats
from nanoengine.engine.metrics import EngineMetrics, EngineStats
from nanoengine.engine.request import Request
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams, StepFailed
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from nanoengine.tokenizer import Message

logger = logging.getLogger("nanoengine")

Prompt = str | Sequence[int]


class LLM:
    """A model, ready to generate.

    Args:
        model: "demo" (bundled), "smollm2" (once fetched), a local folder, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B".
        use_tqdm: show what start-up is doing: compiling kernels, loading weights, recording.
        options: the fields of `EngineConfig`.

    Raises:
        UnknownOption, InvalidConfig, KVCacheTooSmall: an option is unknown, or cannot work.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken.

    Use it as a context manager, or call `close`, to have its memory back at a definite time.
    """

    def __init__(self, model: str = "demo", *, use_tqdm: bool = True, **options: Any):
        self.config = EngineConfig.from_options(model, options)
        show_log()
        built = build_engine(self.config, use_tqdm)
        self.engine, self.model_config, self.tokenizer = built.engine, built.model_config, built.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, or a list of such.
            sampling_params: one for all prompts, or one for each.
            cache_salt: cached prefixes are shared only among calls of equal salt: tenants with salts of their own cannot
                learn from response times what others have asked.
            use_tqdm: show a progress bar.

        Raises:
            InvalidPrompt, InvalidSamplingParams: any prompt or params are bad; then nothing has run.
            StepFailed: an exception inside a step; its `outputs` hold what the other requests got.
        """
        prompt_list = _prompt_list(prompts)
        params = _params_list(sampling_params, len(prompt_list))
        pairs = zip(prompt_list, params, strict=True)
        return self._run([self.engine.make_request(*pair, cache_salt=cache_salt) for pair in pairs], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one conversation, or several: lists of {"role": ..., "content": ...}, in the model's chat template.

        `tools` are JSON schemas of functions that the template tells the model about. `chat_template_kwargs` are passed to the
        template, such as {"enable_thinking": False} for Qwen3. Otherwise as `generate`.
        """
        if not isinstance(messages, Sequence):
            raise InvalidPrompt(
                f"messages must be a list of messages or of conversations, not {type(messages).__name__}"
            )
        if not messages:
            return []
        is_one = isinstance(messages[0], dict)
        conversations = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        prompts = [
            self.tokenizer.encode_chat(conversation, chat_template_kwargs, tools) for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, cache_salt=cache_salt, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Find the likeliest continuations of prompts; `outputs` of each result are its beams, best first.

        Raises:
            InvalidPrompt, InvalidSamplingParams: bad prompts, or more beams than the engine can run at once.
            StepFailed: as `generate`.
        """
        return self._run([self.engine.make_beam_request(prompt, params) for prompt in _prompt_list(prompts)], use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt and yield its text piece by piece, as soon as each piece is final.

        The pieces together are the text that `generate` returns. The prompt is checked at the call and queued when the first
        piece is asked for; closing the iterator early aborts the request.
        """
        if sampling_params is not None and sampling_params.num_sequences != 1:
            raise InvalidSamplingParams(
                f"n is {sampling_params.n} and best_of is {sampling_params.best_of}: a stream has one completion"
            )
        return self._stream(self.engine.make_request(prompt, sampling_params))

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        return self.tokenizer.hf

    @property
    def cache_stats(self) -> CacheStats:
        """How much of what was asked for the prefix cache had, and in which tier."""
        return self.engine.scheduler.block_manager.stats

    @property
    def metrics(self) -> EngineMetrics:
        """All that the engine counts, as it stands now."""
        return self.engine.metrics()

    def listen_to_kv_events(self, listener: Callable[[KVEvent], None] | None) -> None:
        """Call `listener` with each block of the prefix cache that comes or goes, for a router of requests; None ends it.

        It hears first of all that is cached now, and after each step of what has changed in it.
        """
        self.engine.listen_to_kv_events(listener)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, also those in host memory and on disk; refused (False) while any request runs."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort what runs and give the memory back. Closing twice is allowed."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: Sequence[Request], use_tqdm: bool) -> list[RequestOutput]:
        before = copy(self.engine.stats)
        try:
            # Without miniters=0, tqdm would look at the clock only when a request ends.
            with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm, miniters=0) as bar:
                for request in requests:
                    self.engine.submit(request)
                unfinished = {request.request_id for request in requests}
                while unfinished:
                    # A step that touched nobody is no step forward: somebody else may have ended the others.
                    touched = self.engine.step() or requests
                    ended = {request.request_id for request in touched if request.finished} & unfinished
                    unfinished -= ended
                    if use_tqdm:
                        bar.set_postfix_str(self._progress(before), refresh=False)
                        bar.update(len(ended))
        finally:  # after Ctrl-C, nobody waits for the rest
            with InterruptGuard():  # a second Ctrl-C waits until all are gone
                for request in requests:
                    self.engine.abort(request.request_id)

        outputs = [request.output() for request in requests]
        errors = [request.error for request in requests if request.error is not None]
        if errors:
            raise StepFailed(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}", outputs) from errors[0]
        return outputs

    def _stream(self, request: Request) -> Iterator[str]:
        sent = 0
        try:
            self.engine.submit(request)
            while True:
                piece = request.completions[0].detokenizer.text_from(sent)
                if piece:
                    yield piece
                    sent += len(piece)
                elif request.finished:
                    break
                else:
                    self.engine.step()
        finally:
            self.engine.abort(request.request_id)
        if request.error is not None:
            raise StepFailed(f"the request failed: {request.error}", [request.output()]) from request.error

    def _progress(self, before: EngineStats) -> str:
        """What the engine does now, and its rates since `before`."""
        stats, scheduler = self.engine.stats.since(before), self.engine.scheduler
        return (
            f"prefill {stats.prefill_rate:.0f} tok/s, decode {stats.decode_rate:.0f} tok/s, "
            f"KV {scheduler.block_manager.pool.usage:.0%}, running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"
        )


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidPrompt(
            f"prompts must be a string, a list of token ids or a list of such, not {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidSamplingParams(
            f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}"
        )
    if len(params) != count:
        raise InvalidSamplingParams(
            f"sampling_params has {len(params)} entries for {count} prompts: give one, or one for each"
        )
    return list(params)


def show_log() -> None:
    """Show the start-up line on stderr, unless the application has its own logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("nanoengine: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
