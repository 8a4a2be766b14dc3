"""LLM: the front door. It runs an engine until its callers have what they asked for."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Self, cast

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidPrompt, InvalidSamplingParams, StepFailed
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.outputs import RequestOutput
from nanoengine.core.sampling_params import CoreSamplingParams
from nanoengine.core.sequence import Request

Prompt = str | Seq[int]


class CoreLLM:
    """A model, ready to generate.

    Args:
        model: a folder.
        options: the fields of `EngineConfig`.

    Raises:
        UnknownOption, InvalidConfig, KVCacheTooSmall: an option is unknown, or cannot work.
        ModelNotFound, UnsupportedModel, InvalidWeights: the model is missing, unsupported or broken.
    """

    def __init__(self, model: str, **options: Any):
        from nanoengine.core.startup import Startup  # it imports torch: only when a model is loaded

        self.config = EngineConfig.from_options(model, options)
        self.engine: LLMEngine = Startup(self.config).build()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: CoreSamplingParams | Seq[CoreSamplingParams] | None = None,
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, or a list of such.
            sampling_params: one for all prompts, or one for each.
            cache_salt: cached prefixes are shared only among calls of equal salt.

        Raises:
            InvalidPrompt, InvalidSamplingParams: any prompt or params are bad; then nothing has run.
            StepFailed: an exception inside a step; its `outputs` hold what the other requests got.
        """
        return self.run(self.make_requests(prompts, sampling_params, cache_salt))

    def make_requests(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: CoreSamplingParams | Seq[CoreSamplingParams] | None,
        cache_salt: str = "",
    ) -> list[Request]:
        """A request for each prompt; nothing runs yet."""
        listed = prompt_list(prompts)
        pairs = zip(listed, params_list(sampling_params, len(listed)), strict=True)
        return [self.engine.make_request(*pair, cache_salt=cache_salt) for pair in pairs]

    def run(
        self, requests: Seq[Request], after_step: Callable[[list[Request]], object] = lambda _: None
    ) -> list[RequestOutput]:
        """Run requests to their end; after each step a function is told which requests it advanced."""
        try:
            for request in requests:
                self.engine.submit(request)
            for request in requests:
                while not request.finished:
                    after_step(self.engine.step())
        finally:  # after Ctrl-C, nobody waits for the rest
            for request in requests:
                self.engine.abort(request.request_id)
        outputs = [request.output() for request in requests]
        errors = [request.error for request in requests if request.error is not None]
        if errors:
            raise StepFailed(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}", outputs) from errors[0]
        return outputs

    def close(self) -> None:
        """Abort what runs and give the memory back. Closing twice is allowed."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Prompts as a list; raises InvalidPrompt for what is none."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Seq):
        raise InvalidPrompt(
            f"prompts must be a string, a list of token ids or a list of such, not {type(prompts).__name__}"
        )
    if prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return list(cast(Seq[Prompt], prompts))


def params_list(
    params: CoreSamplingParams | Seq[CoreSamplingParams] | None, count: int
) -> list[CoreSamplingParams | None]:
    if params is None or isinstance(params, CoreSamplingParams):
        return [params] * count
    if not isinstance(params, Seq):
        raise InvalidSamplingParams(
            f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}"
        )
    if len(params) != count:
        raise InvalidSamplingParams(
            f"sampling_params has {len(params)} entries for {count} prompts: give one, or one for each"
        )
    return list(params)
