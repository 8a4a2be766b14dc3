"""Session: an engine ready to be measured, with its limit, and what its figures depend on."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.ceiling import is_slower_than_float32, measure_ceiling
from benchmarks.drive import NO_PARAMS, TEMPERATURE, Adapt, Run, drive
from benchmarks.limit import Ceiling, ModelLimit, kv_bytes_per_token
from benchmarks.options import check_lengths, engine_options
from benchmarks.progress import bar
from benchmarks.random_weights import SHAPES, random_checkpoint
from benchmarks.report import Report
from benchmarks.workload import Workload, random_tokens
from nanoengine import LLM
from nanoengine.builder import read_config
from nanoengine.core.model_runner import ModelRunner
from nanoengine.core.scheduler import Scheduler
from nanoengine.interrupts import Interruptible
from nanoengine.kernels.capability import choose_dtype
from nanoengine.models.decoder import Decoder
from nanoengine.models.description import config_table
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.model_impl import choose_implementation
from nanoengine.models.names import find_model
from nanoengine.models.transformers_backend.decoder import TransformersDecoder


def runner_of(llm: LLM) -> ModelRunner:
    """What computes the steps of an engine."""
    executor = llm.engine.executor
    assert isinstance(executor, Interruptible)
    assert isinstance(executor.executor, ModelRunner)
    return executor.executor


def model_of(runner: ModelRunner) -> Decoder | TransformersDecoder:
    assert isinstance(runner.model, Decoder | TransformersDecoder)
    return runner.model


def weight_bytes(model: Decoder | TransformersDecoder) -> int:
    """Of all matrices, in memory."""
    return sum(sum(matrix.formats().values()) for matrix in model.matrices)


@dataclass
class Session:
    """One engine."""

    llm: LLM
    report: Report
    runner: ModelRunner

    @property
    def model_config(self) -> ModelConfig:
        return self.llm.built.models.model_config

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.vocab_size

    @property
    def scheduler(self) -> Scheduler:
        return self.llm.engine.scheduler

    @property
    def device(self) -> torch.device:
        return self.runner.device.torch_device

    @property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.llm.config.dtype, self.model_config.dtype, self.device)

    @cached_property
    def limit(self) -> ModelLimit:
        config, runner = self.model_config, self.runner
        kv_bytes = kv_bytes_per_token(runner.kv_cache.pool_layers[0], runner.block_size, len(config.attention_layers))
        num_weights = self.llm.built.models.num_parameters
        return ModelLimit(config, self.dtype.itemsize, kv_bytes, weight_bytes(model_of(runner)), num_weights)

    @property
    def backend(self) -> str:
        model = model_of(self.runner)
        backend = (
            model.backend if isinstance(model, TransformersDecoder) else model.layers[0].self_attn.attention.backend
        )
        return backend.name

    def run(
        self,
        workload: Workload,
        label: str,
        *,
        keep_cache: bool = False,
        temperature: float = TEMPERATURE,
        num_streams: int = 0,
        params: Mapping[str, Any] = NO_PARAMS,
        adapt: Adapt | None = None,
    ) -> Run:
        """One workload through the engine, with a progress bar; see `drive`. The prefix cache is empty at its start unless told
        otherwise."""
        if not keep_cache:
            self.llm.reset_prefix_cache()
        with bar(label, total=workload.num_output_tokens, unit="token") as shown:
            engine, told = self.llm.engine, shown.update
            return drive(engine, workload, told, temperature, num_streams=num_streams, params=params, adapt=adapt)

    def measure_ceiling(self) -> Ceiling:
        """What the device can do right now: shared machines change from minute to minute."""
        ceiling = measure_ceiling(self.device, self.dtype)
        figures = {"read_gb_s": ceiling.read_bytes_s / 1e9, "matmul_tflop_s": ceiling.flop_s / 1e12}
        self.report.add({}, figures, "limit of this device")
        return ceiling

    def tokens(self, count: int, seed: int) -> list[int]:
        return random_tokens(random.Random(seed), count, self.vocab_size)


@contextmanager
def checkpoint(args: argparse.Namespace, options: dict[str, Any], longest: int) -> Iterator[str]:
    """The model that the options name, its random weights made and deleted again; bad options are refused before any work.

    Args:
        args: with the options of `add_model_options`.
        options: of the engine; a model of random weights gets a tokenizer here, which is never used.
        longest: tokens of the longest request, prompt and output.
    """
    model = "demo" if args.random_weights else args.model
    config = read_config(model, options)
    if args.random_weights:
        most = SHAPES[args.random_weights]["max_position_embeddings"]
    else:
        table = config_table(find_model(model))
        most = choose_implementation(model, args.model_impl, table, None, ()).config.max_position_embeddings
    check_lengths(longest, config.max_model_len or most, "max_model_len")
    if args.random_weights:
        options.setdefault("tokenizer", "demo")
        with random_checkpoint(args.random_weights) as folder:
            yield folder
    else:
        yield model


@contextmanager
def open_session(args: argparse.Namespace, report: Report, longest: int) -> Iterator[Session]:
    """Load the engine that is to be measured. The arguments are those of `checkpoint`."""
    options = engine_options(args)
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(args, options, longest))
        llm = stack.enter_context(LLM(model, **options))
        check_lengths(longest, llm.engine.max_model_len, "max_model_len (lowered to what the KV pool holds)")
        session = Session(llm, report, runner_of(llm))
        report.facts |= {
            "device": str(session.device),
            "dtype": str(session.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "backend": session.backend,
            "kv_blocks": session.scheduler.blocks.num_blocks,
            "parameters": session.llm.built.models.num_parameters,
        }
        _warn_of_slow_paths(session)
        yield session


def _warn_of_slow_paths(session: Session) -> None:
    report = session.report
    if session.backend == "torch":
        report.warn("attention runs as plain torch operations (backend torch), not in a kernel of its own")
    if session.device.type == "cpu":
        if torch.get_num_threads() < report.facts["cores"]:
            report.warn(f"torch uses {torch.get_num_threads()} threads on {report.facts['cores']} cores")
        if is_slower_than_float32(session.device, session.dtype):
            report.warn(f"this device multiplies {report.facts['dtype']} more slowly than float32")
