"""LLM: the front door. It puts the engine together, runs it until its callers have what they asked for, and shows progress."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, cast

from tqdm import tqdm

from nanoengine.config import EngineConfig, ModelConfig
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.interrupts import InterruptGuard
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.request import Request
from nanoengine.engine.scheduler import Scheduler
from nanoengine.errors import InvalidPrompt, InvalidSamplingParams, StepFailed
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.tokenizer import HFTokenizer, Message

logger = logging.getLogger("nanoengine")

Prompt = str | Sequence[int]


class LLM:
    """A model, ready to generate.

    Args:
        model: "demo" (bundled), a local folder, or a hub name such as "Qwen/Qwen3-0.6B".
        use_tqdm: show a progress bar while loading.
        options: the fields of `EngineConfig`.

    Raises:
        UnknownOption, InvalidConfig, KVCacheTooSmall: an option is unknown, or cannot work.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken.

    Use it as a context manager, or call `close`, to have its memory back at a definite time.
    """

    def __init__(self, model: str = "demo", *, use_tqdm: bool = True, **options: Any):
        self.config = EngineConfig.from_options(model, options)
        self.engine, self.model_config, self.tokenizer = _build_engine(self.config, use_tqdm)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, or a list of such.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Raises:
            InvalidPrompt, InvalidSamplingParams: any prompt or params are bad; then nothing has run.
            StepFailed: an exception inside a step; its `outputs` hold what the other requests got.
        """
        prompt_list = _prompt_list(prompts)
        params = _params_list(sampling_params, len(prompt_list))
        return self._run([self.engine.make_request(*pair) for pair in zip(prompt_list, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one conversation, or several: lists of {"role": ..., "content": ...}, in the model's chat template."""
        if not isinstance(messages, Sequence):
            raise InvalidPrompt(
                f"messages must be a list of messages or of conversations, not {type(messages).__name__}"
            )
        if not messages:
            return []
        is_one = isinstance(messages[0], dict)
        conversations = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        prompts = [self.tokenizer.encode_chat(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt and yield its text piece by piece, as soon as each piece is final.

        The pieces together are the text that `generate` returns. The prompt is checked and queued at the call; closing the
        iterator early aborts the request.
        """
        if sampling_params is not None and sampling_params.n != 1:
            raise InvalidSamplingParams(f"n is {sampling_params.n}: a stream has one completion")
        request = self.engine.add_request(prompt, sampling_params)
        return self._stream(request)

    def close(self) -> None:
        """Abort what runs and give the memory back. Closing twice is allowed."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        unfinished = {request.request_id for request in requests}
        try:
            with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
                for request in requests:
                    self.engine.submit(request)
                while unfinished:
                    for request in self.engine.step():
                        if request.finished and request.request_id in unfinished:
                            unfinished.remove(request.request_id)
                            bar.update()
                    if use_tqdm:
                        bar.set_postfix_str(self._progress(), refresh=False)
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
            while True:
                text = request.completions[0].detokenizer.text
                if len(text) > sent:
                    yield text[sent:]
                    sent = len(text)
                elif request.finished:
                    break
                else:
                    self.engine.step()
        finally:
            self.engine.abort(request.request_id)
        if request.error is not None:
            raise StepFailed(f"the request failed: {request.error}", [request.output()]) from request.error

    def _progress(self) -> str:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        return (
            f"prefill {stats.prefill_rate:.0f} tok/s, decode {stats.decode_rate:.0f} tok/s, "
            f"KV {scheduler.block_manager.pool.usage:.0%}, running {len(scheduler.running)}, waiting {len(scheduler.waiting)}"
        )


def _build_engine(config: EngineConfig, use_tqdm: bool) -> tuple[LLMEngine, ModelConfig, HFTokenizer]:
    # torch is needed from here on, and not before: `import nanoengine` takes no time.
    from nanoengine.models.loader import find_model, read_json
    from nanoengine.runner.model_runner import ModelRunner

    _show_log()
    folder = find_model(config.model)
    hf_config = read_json(folder, "config.json")
    model_config = ModelConfig.from_hf(hf_config)
    tokenizer = HFTokenizer(folder if config.tokenizer is None else find_model(str(config.tokenizer)))
    runner = ModelRunner(config, model_config, folder, use_tqdm=use_tqdm)
    scheduler = Scheduler(
        BlockManager(runner.num_blocks, config.block_size, config.enable_prefix_caching),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
    )
    generation = read_json(folder, "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    engine = LLMEngine(
        scheduler,
        runner,
        tokenizer,
        vocab_size=model_config.vocab_size,
        eos_token_ids=_eos_token_ids(
            generation.get("eos_token_id"), hf_config.get("eos_token_id"), tokenizer.eos_token_id
        ),
        seed=config.seed,
    )
    return engine, model_config, tokenizer


def _eos_token_ids(*sources: int | list[int] | None) -> list[int]:
    """All tokens that any of the model's files calls end of text: they often disagree, and each means it."""
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else [] if source is None else [source])
    return sorted(ids)


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


def _show_log() -> None:
    """Show the start-up line on stderr, unless the application has its own logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("nanoengine: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
