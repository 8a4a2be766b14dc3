"""An executor in another process: what it knows of the engine came to it as the bytes of plans."""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nanoengine.config import EngineConfig
from nanoengine.engine.executor import ExecutorInfo
from nanoengine.engine.messages import StepPlan, StepResult
from nanoengine.models.model_config import ModelConfig

POISON = 222
"""A token at which the model over there raises."""


class RemoteStep:
    def __init__(self, executor: RemoteExecutor):
        self.executor = executor

    def result(self) -> StepResult:
        outcome = self.executor.receive()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class RemoteExecutor:
    """Sends plans, and takes results in the order of the plans."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path, use_tqdm: bool):
        context = multiprocessing.get_context("spawn")
        self.here, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, config, model_config, folder), daemon=True)
        self.process.start()
        there.close()
        self.num_plans = self.num_bytes = 0
        self.info: ExecutorInfo = self.receive()

    def receive(self) -> Any:
        return pickle.loads(self.here.recv_bytes())

    def launch(self, plan: StepPlan) -> RemoteStep:
        message = pickle.dumps(plan)
        self.num_plans += 1
        self.num_bytes += len(message)
        self.here.send_bytes(message)
        return RemoteStep(self)

    def close(self) -> None:
        self.here.send_bytes(pickle.dumps(None))
        self.process.join(30)


def serve(pipe: Connection, config: EngineConfig, model_config: ModelConfig, folder: Path) -> None:
    """The other side: a runner with a pool of NaN, whose model raises at POISON."""
    from nanoengine.runner.startup import start_runner

    torch.set_num_threads(1)
    runner = start_runner(config, model_config, folder, use_tqdm=False)
    assert runner.kv_cache is not None
    runner.kv_cache.fill(float("nan"))
    forward = runner.model.forward

    def sabotaged(input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        hidden = forward(input_ids, positions, metadata)  # its K/V are written by now
        if POISON in input_ids.tolist():
            raise RuntimeError("poisoned")
        return hidden

    runner.model.forward = sabotaged  # type: ignore[method-assign]
    pipe.send_bytes(pickle.dumps(runner.info))
    while (plan := pickle.loads(pipe.recv_bytes())) is not None:
        try:
            outcome: Any = runner.launch(plan).result()
        except Exception as error:
            outcome = RuntimeError(str(error))
        pipe.send_bytes(pickle.dumps(outcome))
    runner.close()
