"""The scheduler of a checkout of nano-vllm (https://github.com/GeeeekExplorer/nano-vllm), to be measured beside ours.

Its package imports what only a GPU has. Scheduler, block manager and sequence need none of it, so they are imported without the
package's own first module and its config.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from time import process_time
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from benchmarks.options import BadOption
from benchmarks.workload import Workload


class NanoVLLM:
    """A checkout."""

    def __init__(self, checkout: Path):
        folder = checkout / "nanovllm"
        if not folder.is_dir():
            raise BadOption(f"--nano-vllm {checkout}: there is no folder nanovllm in it")
        package, config = ModuleType("nanovllm"), ModuleType("nanovllm.config")
        package.__path__ = [str(folder)]
        vars(config)["Config"] = object
        with patch.dict(sys.modules, {"nanovllm": package, "nanovllm.config": config}):
            self._scheduler: Any = import_module("nanovllm.engine.scheduler").Scheduler
            self._sequence: Any = import_module("nanovllm.engine.sequence").Sequence
            self._params: Any = import_module("nanovllm.sampling_params").SamplingParams

    def policy(self, workload: Workload, num_blocks: int, block_size: int, max_num_batched_tokens: int) -> NanoPolicy:
        """Its scheduler with a workload."""
        self._sequence.block_size = block_size
        config = SimpleNamespace(
            max_num_seqs=len(workload),
            max_num_batched_tokens=max_num_batched_tokens,
            eos=-1,
            kvcache_block_size=block_size,
            num_kvcache_blocks=num_blocks,
        )
        scheduler = self._scheduler(config)
        for prompt, count in zip(workload.prompts, workload.output_lens, strict=True):
            params = self._params(temperature=0.6, ignore_eos=True, max_tokens=count)
            scheduler.add(self._sequence(prompt, params))
        return NanoPolicy(scheduler)


class NanoPolicy:
    """Its scheduler, stepped as its engine does."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return not self._scheduler.is_finished()

    def step(self) -> tuple[float, int]:
        self._num_steps += 1
        start = process_time()
        seqs, is_prefill = self._scheduler.schedule()
        scheduled = process_time()
        tokens = [(31 * self._num_steps + i) % 10001 for i in range(len(seqs))]
        sampled = process_time()
        self._scheduler.postprocess(seqs, tokens, is_prefill)
        return process_time() - sampled + scheduled - start, len(seqs)
