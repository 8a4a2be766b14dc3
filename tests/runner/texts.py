"""What follows a prompt: sampled by a runner that computes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from nanoengine.engine.messages import Chunk, StepPlan
from nanoengine.runner.startup import start_runner
from tests.runner.options import engine_config, shape
from tests.runner.plans import decodes, execute, start

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 5, 40, 4, 32


class Texts:
    """The continuations of prompts up to MAX_LEN tokens, by the seeds of their rows; each is computed once."""

    params: ClassVar[dict[str, Any]] = {"temperature": 1.2, "frequency_penalty": 0.5}
    options: ClassVar[dict[str, Any]] = {
        "max_num_seqs": NUM_ROWS,
        "num_kv_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_LEN,
    }

    def __init__(self, folder: Path):
        config = engine_config(folder, kernels="torch", **self.options)
        self._runner = start_runner(config, shape(folder), folder, use_tqdm=False)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, prompt: list[int], seed: int) -> list[int]:
        key = tuple(prompt), seed
        if key not in self._known:
            table = range(1, 1 + MAX_LEN // BLOCK_SIZE)
            begun = start(0, prompt, table, seed=seed, **self.params)
            tokens = execute(self._runner, StepPlan([begun], chunks=[Chunk(0, 0, len(prompt), (0,))])).token_ids
            for position in range(len(prompt), MAX_LEN):
                tokens += execute(self._runner, StepPlan(decodes=decodes((0, position)))).token_ids
            self._known[key] = tokens
        return self._known[key]
