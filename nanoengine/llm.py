"""LLM: the offline interface of an engine, and its loop, with progress bars."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from nanoengine.builder import build_engine, is_installed, read_config, require
from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, StepFailed, shown
from nanoengine.core.llm import CoreLLM
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request
from nanoengine.interrupts import InterruptGuard, Interruptible
from nanoengine.log import show_log
from nanoengine.progress import new_bar
from nanoengine.prompts import Prompt, params_list, plain_prompt, plain_prompts

if TYPE_CHECKING:
    from tqdm import tqdm

    from nanoengine.features.beam_search.params import BeamSearchParams
    from nanoengine.features.lora.adapters import Adapters
    from nanoengine.features.lora.request import LoRARequest
    from nanoengine.features.observability.kv_events import KVEventListener
    from nanoengine.features.observability.metrics import CacheStats, EngineMetrics
    from nanoengine.features.pooling.outputs import EmbeddingOutput
    from nanoengine.features.pooling.params import PoolingParams
    from nanoengine.features.tool_calls.chats import Chats
    from nanoengine.models.tokenizer import Message


class LLM(CoreLLM):
    """A model, ready to generate.

    Args:
        model: "demo" (bundled), "smollm2" (once fetched), a local folder, a .gguf file, or a hub name such as "Qwen/Qwen3-0.6B".
        use_tqdm: show the progress of start-up: compiling kernels, loading weights, recording.
        options: of the engine, and of its capabilities.

    Raises:
        UnknownOption, InvalidConfig, KVCacheTooSmall: an option is unknown, or cannot work.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken.

    Use it as a context manager, or call `close`, to have its memory back at a definite time.
    """

    def __init__(self, model: str | os.PathLike[str] = "demo", *, use_tqdm: bool = True, **options: Any):
        self.config = read_config(str(model) if isinstance(model, os.PathLike) else model, options)
        show_log()
        self.built = build_engine(self.config, use_tqdm)
        self.engine, self.tokenizer = self.built.engine, self.built.tokenizer
        self._interrupts = InterruptGuard()
        self.engine.executor = Interruptible(self.engine.executor, self._interrupts)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: CoreSamplingParams | Sequence[CoreSamplingParams] | None = None,
        *,
        cache_salt: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}; or a list of such.
            sampling_params: one for all prompts, or one for each. None: `get_default_sampling_params()`.
            cache_salt: cached prefixes are shared only among calls of equal salt: tenants with different salts cannot
                learn the prompts of others from response times.
            lora_request: the adapter for all prompts, or one (or None) for each.
            use_tqdm: show a progress bar, if standard error is a terminal or a notebook's page.

        Raises:
            InvalidPrompt, InvalidSamplingParams: any prompt or params are bad; then nothing has run.
            StepFailed: an exception inside a step; its `outputs` hold the results of all requests.
        """
        requests = self.make_requests(prompts, sampling_params, cache_salt)
        self.adapt(requests, lora_request)
        return self._run_with_bar(requests, use_tqdm)

    def make_requests(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Any, cache_salt: str = ""
    ) -> list[Request]:
        """A request for each prompt, not submitted yet."""
        listed = plain_prompts(prompts)
        pairs = zip(listed, params_list(sampling_params, len(listed)), strict=True)
        return [self.engine.make_request(*pair, cache_salt=cache_salt) for pair in pairs]

    def _adapters(self) -> Adapters:
        """The adapters of the engine; raises InvalidConfig or InvalidRequest without any."""
        require("lora")
        from nanoengine.features.lora.adapters import adapters_of

        return adapters_of(self.engine.scheduler.parts)

    def adapt(self, requests: Sequence[Request], wanted: LoRARequest | Sequence[LoRARequest | None] | None) -> None:
        """Set the adapters of requests that do not run yet: one for all, or one (or None) for each. Raises as `generate`."""
        is_list = isinstance(wanted, list | tuple)
        if wanted is not None and not (is_list and all(each is None for each in wanted)):  # type: ignore[union-attr]
            self._adapters().use_for_requests(requests, wanted)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: CoreSamplingParams | Sequence[CoreSamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one conversation, or several: lists of {"role": ..., "content": ...}, in the model's chat template.

        `tools` are JSON schemas of functions that the model may call. `tool_choice` is "none", "auto", "required" or a
        function, and `parallel_tool_calls` whether there may be several, as in OpenAI's interface; `chats.read` reads the calls
        of an output. `chat_template_kwargs` are passed to the
        template, such as {"enable_thinking": False} for Qwen3. Otherwise as `generate`.
        """
        if not isinstance(messages, Sequence):
            raise InvalidPrompt(
                "messages", f" must be a list of messages or of conversations, not {type(messages).__name__}"
            )
        if not messages:
            return []
        is_one = isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_one else messages)
        for each in conversations:
            if not isinstance(each, Sequence):
                raise InvalidPrompt("messages", f" holds {shown(each)}: a conversation is a list of messages")
        rest = {"cache_salt": cache_salt, "lora_request": lora_request, "use_tqdm": use_tqdm}
        if not (is_installed("tool_calls") or tools or tool_choice):
            token_ids = [self.tokenizer.encode_chat(each, chat_template_kwargs) for each in conversations]
            return self.generate(token_ids, sampling_params, **rest)  # type: ignore[arg-type]
        options = {"parallel": parallel_tool_calls, "template_kwargs": chat_template_kwargs}
        prompts = [self.chats.prompt(each, tools, tool_choice, **options) for each in conversations]  # type: ignore[arg-type]
        token_ids = [self.tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts]
        if tools:
            require("sampling")
        if is_installed("sampling"):
            from nanoengine.features.sampling.params import SamplingParams

            listed = [each or self.engine.default_params for each in params_list(sampling_params, len(prompts))]
            sampling_params = [
                prompt.params(each) if isinstance(each, SamplingParams) else each
                for prompt, each in zip(prompts, listed, strict=True)
            ]
        return self.generate(token_ids, sampling_params, **rest)  # type: ignore[arg-type]

    @cached_property
    def chats(self) -> Chats:
        """Renders chats, and parses answers: `chats.read(output, tools)`."""
        require("tool_calls")
        from nanoengine.features.tool_calls.chats import Chats

        return Chats(self.tokenizer)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        cache_salt: str = "",
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Embeddings of prompts, in their order. Params of None: pooling and normalization of the model.

        Raises:
            InvalidPrompt, InvalidSamplingParams, StepFailed: as `generate`.
        """
        require("pooling")
        from nanoengine.features.pooling.outputs import EmbeddingOutput
        from nanoengine.features.pooling.params import PoolingParams

        pooling = PoolingParams() if params is None else params
        listed = pooling if isinstance(pooling, Sequence) else [pooling]
        if not all(isinstance(each, PoolingParams) for each in listed):
            raise InvalidSamplingParams("params", f" must be PoolingParams or a list of them, not {shown(params)}")
        requests = self.make_requests(prompts, pooling, cache_salt)
        self.adapt(requests, lora_request)
        self._run_with_bar(requests, use_tqdm)
        return [EmbeddingOutput.of(request) for request in requests]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Find the likeliest continuations of prompts; `outputs` of each result are its beams, best first.

        Raises:
            InvalidPrompt, InvalidSamplingParams: bad prompts, or more beams than the engine can run at once.
            StepFailed: as `generate`.
        """
        require("beam_search", "sampling")
        from nanoengine.features.beam_search.search import Search, beam_search
        from nanoengine.features.sampling import params as sampling

        listed = plain_prompts(prompts)
        adapters = None if lora_request is None else self._adapters()
        adapter = None if adapters is None or lora_request is None else adapters.find(lora_request)

        def prepare(request: Request) -> None:
            if adapters is not None and adapter is not None:
                adapters.use(request, adapter)

        with _bar(len(listed), use_tqdm) as bar:

            def after_step(searches: list[Search]) -> None:
                bar.update(sum(search.is_over for search in searches) - bar.n)

            with self._interrupts:
                kind = sampling.SamplingParams
                return beam_search(self.engine, listed, params, kind, after_step=after_step, prepare=prepare)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: CoreSamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Complete one prompt and yield its text in pieces, as soon as each piece is final.

        The concatenated pieces are the text that `generate` returns. The prompt is checked at the call and queued at the first
        `next`; closing the iterator early aborts the request.
        """
        request = self.engine.make_request(plain_prompt(prompt), sampling_params)
        self.adapt([request], lora_request)
        if (count := request.params.num_sequences) != 1:
            raise InvalidSamplingParams(f"the params ask for {count} completions: a stream has one")
        return self.stream_request(request)

    def get_default_sampling_params(self) -> CoreSamplingParams:
        """Default sampling parameters: of the model, or for small models (models/default_sampling.py)."""
        return self.engine.default_params

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        return self.tokenizer.hf

    @property
    def metrics(self) -> EngineMetrics:
        """All counters of the engine, now."""
        return self.built.metrics.snapshot(self.engine)

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of hits in the prefix cache."""
        return self.metrics.cache

    def listen_to_kv_events(self, listener: KVEventListener | None) -> None:
        """Call `listener` with each block that the prefix cache adds or drops, for a router of requests; None ends it.

        The first events have all blocks of the cache now; changes follow after each step.
        """
        self.built.metrics.events.attach(listener, self.engine)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, also in host memory and on disk; refused (False) while any request runs."""
        with self._interrupts:
            return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Abort all requests and free the memory; Ctrl-C waits for it. Closing twice is allowed."""
        with self._interrupts:
            super().close()

    def _run_with_bar(self, requests: Sequence[Request], use_tqdm: bool) -> list[RequestOutput]:
        metrics = self.built.metrics if use_tqdm and "observability" in self.built.capabilities else None
        before, ids = None if metrics is None else copy(metrics.steps), {request.request_id for request in requests}
        with _bar(len(requests), use_tqdm) as bar, self._interrupts:

            def after_step(advanced: Sequence[Request]) -> None:
                if metrics is not None and before is not None:
                    bar.set_postfix_str(metrics.progress(self.engine, before), refresh=False)
                bar.update(sum(request.finished and request.request_id in ids for request in advanced))

            return self.run(requests, after_step)

    def stream_request(self, request: Request) -> Generator[str, None, None]:
        """Stream a request of `make_requests`, as `stream` does; `request.output()` is its result so far."""
        sent, is_over = 0, False
        try:
            with self._interrupts:
                self.engine.submit(request)
            while not is_over:
                with self._interrupts:
                    is_over, [seq] = request.finished, request.sequences
                    if not (piece := seq.text_from(sent)) and not is_over:
                        self.engine.step()
                        piece = seq.text_from(sent)
                if piece:
                    yield piece
                    sent += len(piece)
        finally:
            with self._interrupts:
                self.engine.abort(request.request_id)
        if request.error is not None:
            raise StepFailed(f"the request failed: {request.error}", [request.output()]) from request.error


def _bar(total: int, use_tqdm: bool) -> tqdm[Any]:
    # Without miniters=0, tqdm would look at the clock only when a request ends.
    layout = "{desc}: {n_fmt}/{total_fmt} requests, {elapsed}{postfix}"
    return new_bar(shown=use_tqdm, total=total, desc="Generating", bar_format=layout, miniters=0)
