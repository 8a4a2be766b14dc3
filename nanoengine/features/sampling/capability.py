"""Sampling beyond the core, as a capability of the engine."""

from __future__ import annotations

from nanoengine.core.capability import Capability
from nanoengine.core.startup import Startup
from nanoengine.features.sampling.collector import Collector
from nanoengine.features.sampling.params import MAX_LOGPROBS, SamplingParams
from nanoengine.features.sampling.runner_part import SamplingPart
from nanoengine.features.sampling.thinking import ThinkingPart


class Sampling(Capability):
    def before_pool(self, startup: Startup) -> None:
        startup.default_params = SamplingParams()  # `policy` of the models may set those of the model's files
        startup.worst_case_params = SamplingParams(
            top_k=10, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, logprobs=MAX_LOGPROBS
        )

    def runner(self, startup: Startup) -> None:
        SamplingPart(startup.runner)

    def policy(self, startup: Startup) -> None:
        startup.parts += [Collector(), ThinkingPart(startup.tokenizer.decode)]
