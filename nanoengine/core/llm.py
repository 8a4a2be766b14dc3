"""LLM: the offline interface of an engine, and its loop."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Self

from nanoengine.core.config import EngineConfig
from nanoengine.core.errors import InvalidPrompt, StepFailed
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
        self, prompts: Seq[Prompt], sampling_params: CoreSamplingParams | None = None, *, cache_salt: str = ""
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in their order.

        Args:
            prompts: each a string or a list of token ids.
            sampling_params: of all prompts.
            cache_salt: cached prefixes are shared only among calls of equal salt.

        Raises:
            InvalidPrompt, InvalidSamplingParams: any prompt or the params are bad; then nothing has run.
            StepFailed: an exception inside a step; its `outputs` hold the results of all requests.
        """
        if isinstance(prompts, str):
            raise InvalidPrompt("prompts", " is a string: it must be a list of strings, or of lists of token ids")
        return self.run([self.engine.make_request(each, sampling_params, cache_salt=cache_salt) for each in prompts])

    def run(
        self, requests: Seq[Request], after_step: Callable[[list[Request]], object] = lambda _: None
    ) -> list[RequestOutput]:
        """Run requests to their end. `after_step` is called with the requests that a step advanced."""
        try:
            for request in requests:
                self.engine.submit(request)
            for request in requests:
                while not request.finished:
                    after_step(self.engine.step())
        finally:  # after Ctrl-C, the other requests end
            for request in requests:
                self.engine.abort(request.request_id)
        outputs = [request.output() for request in requests]
        errors = [request.error for request in requests if request.error is not None]
        if errors:
            raise StepFailed(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}", outputs) from errors[0]
        return outputs

    def close(self) -> None:
        """Abort all requests and free the memory. Closing twice is allowed."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
