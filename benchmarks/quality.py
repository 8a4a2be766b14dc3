"""What quantization loses: next-token distributions of a model, computed in several ways, beside those of the reference.

The reference is the checkpoint in float32, with activations that are not rounded. Every way computes the same texts, token by
token as they stand there: modules that the demo model has not seen ("code"), and the reference of the Python language ("prose"),
in windows that begin anew.

kl_nats          mean over all places of KL(reference || way), in nats
kl_p99_nats      one place in a hundred has more
perplexity       of the text itself; up_percent: above that of the reference, give or take up_error_percent (its standard error)
same_top_share   of places where the likeliest token is that of the reference
weights_mib      of all matrices in memory

Weights of a way are "stored": as the checkpoint has them; int8, int4, int4-128: as the engine's option `quantization` makes them;
a format of ggml: as benchmarks/block_encoder.py rounds to it, which is worse than llama.cpp does. Weights that a file has
quantized already are made numbers before they become something else.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import block_encoder
from benchmarks.figures import Figures
from benchmarks.options import BadOption, add_engine_option, positive_int
from benchmarks.progress import bar
from benchmarks.report import Report
from benchmarks.session import model_of, runner_of, weight_bytes
from benchmarks.texts import TEXTS, windows
from nanoengine import LLM, SamplingParams
from nanoengine.core.config import DTYPES
from nanoengine.core.inputs import pack
from nanoengine.core.messages import RowSampling, Run, Started, StepPlan
from nanoengine.core.model_runner import ModelRunner
from nanoengine.kernels.attention import AttentionBackend
from nanoengine.kernels.operations import Kernels
from nanoengine.models.checkpoint import Checkpoint, TensorHeader
from nanoengine.models.decoder import Decoder, build_model
from nanoengine.models.loader import Quantizer, load_weights, open_checkpoint
from nanoengine.models.names import WEIGHT_FILES, find_model
from nanoengine.models.options import QUANTIZATIONS
from nanoengine.models.quantization.at_load import quantizer

STORED = "stored"
WEIGHTS = (STORED, *QUANTIZATIONS, *block_encoder.FORMATS)
AT_ONCE = 128
"""Places whose distributions are compared at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="'demo' (bundled), a folder, a .gguf file, or a name")
    parser.add_argument(
        *("--weights", "-w"),
        nargs="+",
        choices=WEIGHTS,
        default=[name for name in WEIGHTS if name != "fp8"],
        help="(default: all but fp8)",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="(default: float32)")
    activations = ("float32", "bfloat16", "int16", "int8", "auto")
    parser.add_argument(
        "--activations", nargs="+", choices=activations, default=["float32", "int8"], help="(default: float32 int8)"
    )
    parser.add_argument("--texts", nargs="+", choices=TEXTS, help="(default: code of the demo model, both of others)")
    parser.add_argument("--window", type=positive_int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=positive_int,
        default=8192,
        help="in all (default: %(default)s); the logits of the reference are kept for each",
    )
    add_engine_option(parser, "any further field of EngineConfig, for all ways but the reference")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here too")


@dataclass(frozen=True)
class Way:
    """How a model is computed.

    Attributes:
        weights: one of `WEIGHTS`.
        options: of the engine.
    """

    weights: str = STORED
    dtype: str = "float32"
    activations: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace, report: Report) -> None:
    kinds = args.texts or (["code"] if args.model == "demo" else list(TEXTS))
    count = args.tokens // (len(kinds) * args.window)
    if count < 1:
        raise BadOption(f"--tokens is {args.tokens}: one window of each text takes {len(kinds) * args.window}")
    with opened(args.model, Way(), args.window) as way:
        texts = windows(kinds, way.llm.tokenizer, count, args.window)
        references = [way.logits(text) for text in texts]
        report.facts |= {"texts": kinds, "windows": len(texts), "device": str(way.runner.device.torch_device)}
    options = dict(args.option)
    combinations = list(product(args.weights, args.dtype, args.activations))
    for weights, dtype, activations in bar("ways to store and compute", combinations):
        with opened(args.model, Way(weights, dtype, activations, options), args.window) as way:
            comparison = Comparison()
            for text, reference in zip(texts, references, strict=True):
                comparison.add(reference, way.logits(text), text)
            figures = comparison.figures() | {"weights_mib": weight_bytes(way.model) / 2**20}
        report.add({"weights": weights, "dtype": dtype, "activations": activations}, figures)


# ---- computing


@dataclass
class Opened:
    """A model, ready to compute one text at a time."""

    llm: LLM
    runner: ModelRunner
    model: Decoder

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[tokens - 1, vocab_size] float32: what is predicted after each token but the last, whose successor nobody knows."""
        runner = self.runner
        blocks = -(-len(token_ids) // runner.block_size)
        tables = [
            list(range(1 + group * blocks, 1 + (group + 1) * blocks))
            for group in range(max(runner.kv_cache.groups) + 1)
        ]
        how = RowSampling(SamplingParams(), seed=0, num_prompt_tokens=len(token_ids))
        started = Started(0, list(token_ids), tables, how)
        plan = StepPlan(started=[started], runs=[Run(0, 0, len(token_ids), samples=False)])
        runner.rows.apply(plan)
        packed = pack(plan, runner.rows)
        runner.send(packed)
        batch = runner.batch(packed)
        hidden = self.model.forward(batch.input_ids, batch.positions, batch.metadata)
        return self.model.compute_logits(hidden[:-1]).cpu()


@contextmanager
def opened(name: str, way: Way, window: int) -> Iterator[Opened]:
    """A model, loaded to be computed in one way.

    Args:
        window: tokens of the longest text.
    """
    options = {"max_model_len": window, "max_num_batched_tokens": window, "max_num_seqs": 1, **way.options}
    with LLM(name, dtype=way.dtype, activation_dtype=way.activations, use_tqdm=False, **options) as llm:
        runner = runner_of(llm)
        model = model_of(runner)
        assert isinstance(model, Decoder)  # quantized once more, and compared, are families alone
        if way.weights != STORED:
            model = _with_weights(name, way, model, runner)
            model.prepare(window)
        yield Opened(llm, runner, model)


def _with_weights(name: str, way: Way, like: Decoder, runner: ModelRunner) -> Decoder:
    dtype, kernels, backend = getattr(torch, way.dtype), runner.kernels, like.layers[0].self_attn.attention.backend
    assert isinstance(kernels, Kernels)
    assert isinstance(backend, AttentionBackend)
    model = build_model(like.config, kernels, backend, dtype, runner.device.torch_device)
    checkpoint = AsNumbers(open_checkpoint(find_model(name, WEIGHT_FILES)))
    load_weights(model.checkpoint_tensors(), checkpoint, dtype, quantize=_quantizer(way.weights), use_tqdm=False)
    return model


def _quantizer(weights: str) -> Quantizer:
    if weights in QUANTIZATIONS:
        return quantizer(weights)
    return partial(block_encoder.encode, type=weights)


class AsNumbers:
    """A `Checkpoint` whose matrices are numbers, whatever the files have."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint, self.location = checkpoint, checkpoint.location
        self.fingerprint: Callable[[], str] = checkpoint.fingerprint

    def headers(self) -> Iterator[TensorHeader]:
        return self._checkpoint.headers()

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, source in self._checkpoint.tensors(dtype):
            yield name, source if isinstance(source, Tensor) else source.dequantize(torch.float32)


# ---- comparing


class Comparison:
    """The distributions of a way beside those of the reference, place by place."""

    def __init__(self) -> None:
        self._divergences: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._reference_losses: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, reference: Tensor, logits: Tensor, token_ids: Sequence[int]) -> None:
        """Logits [n, vocab_size] of both, behind the first n of n + 1 tokens."""
        following = torch.tensor(token_ids[1:])[:, None]
        parts = zip(reference.split(AT_ONCE), logits.split(AT_ONCE), following.split(AT_ONCE), strict=True)
        for ours, theirs, tokens in ((a.double(), b.double(), c) for a, b, c in parts):
            expected, found = ours.log_softmax(1), theirs.log_softmax(1)
            self._divergences.append((expected.exp() * (expected - found)).sum(1))
            self._losses.append(-found.gather(1, tokens).squeeze(1))
            self._reference_losses.append(-expected.gather(1, tokens).squeeze(1))
            self._same.append(expected.argmax(1) == found.argmax(1))

    def figures(self) -> Figures:
        divergences, losses = torch.cat(self._divergences), torch.cat(self._losses)
        more = losses - torch.cat(self._reference_losses)
        return {
            "kl_nats": divergences.mean().item(),
            "kl_p99_nats": divergences.quantile(0.99).item(),
            "perplexity": math.exp(losses.mean().item()),
            "up_percent": 100 * math.expm1(more.mean().item()),
            "up_error_percent": 100 * more.std().item() / len(more) ** 0.5,
            "same_top_share": torch.cat(self._same).double().mean().item(),
        }
