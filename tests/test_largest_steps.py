"""What a GPU's free memory is measured with: the largest steps, on a runner that has all that capabilities add to one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from nanoengine.builder import CAPABILITIES, find_folder, read_config
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.sampler import Sampler
from nanoengine.core.startup import Startup


def test_the_largest_steps_have_everything_that_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "device": "cpu",
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
        "num_kv_blocks": 20,
    }
    modules = {folder: import_module(f"{find_folder(folder)}.capability") for folder in CAPABILITIES}
    parts = [getattr(modules[folder], entry.capability)() for folder, entry in CAPABILITIES.items()]
    startup = Startup(read_config("demo", options | {"speculation": "ngram", "enforce_eager": True}), parts)
    startup.build().close()
    plans: list[Any] = []
    asked: set[str] = set()
    launch, sample = ModelRunner.launch, Sampler.sample

    def launched(self: ModelRunner, plan: Any) -> Any:
        plans.append(plan)
        return launch(self, plan)

    def sampled(self: Sampler, *args: Any) -> Any:
        asked.update(type(own).__name__ for own in self.processors if own.pieces)
        return sample(self, *args)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(Sampler, "sample", sampled)
    startup.run_largest_steps()
    prompts, decodes, drafted = plans
    assert prompts.num_tokens == 64
    assert len(decodes.decode_rows) == 6
    assert drafted.num_drafted == 4
    assert drafted.num_samples == 64, "each of them has logits"
    assert asked >= {"SampleLogprobs", "Penalties"}
