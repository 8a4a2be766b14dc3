"""Check, measure and choose the variants of the CUDA path for the GPU that is there.

    python -m benchmarks.gpu.choose --save choose.json --tuning FOLDER

From the tuning that is there on, one field after the other gets its other values, and the fastest is kept (coordinate descent),
if all it computes is right: logits as near to the default's as rounding leaves them, and in the end the same bits in 200
replays, even where every kernel is late. `--warm I N` compiles the I-th part of N of all variants.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.alone import RELEVANT, TILES, draws, of_prompts, prompts, quantized
from benchmarks.gpu.chain import BLOCK_SIZE, Chain, Inputs
from benchmarks.gpu.clock import device_facts, measure_rates, seconds
from benchmarks.gpu.edges import edges
from benchmarks.gpu.flash import compile_flash, flash_prompts
from benchmarks.gpu.parts import kept_going
from benchmarks.gpu.specialized import main as specialized_kernels
from benchmarks.gpu.specialized import specialized
from benchmarks.limit import Ceiling, ModelLimit, StepWork, kv_bytes_per_token
from benchmarks.options import positive_int
from benchmarks.random_weights import SHAPES
from benchmarks.report import Report
from benchmarks.workload import lens_of_workload
from nanoengine.kernels.triton.dependent import LATE
from nanoengine.kernels.triton.launch import specializes_warps
from nanoengine.kernels.triton.tuning import DEFAULTS, Tuning, file_name, load_tuning

SIZES = (1, 4, 16, 64, 131, 256)
"""Sequences of a step: one of 1,088 tokens, several as the workload of 256 requests has them when so many are left."""
PROMPT = "prompt"
LONG = "long"
"""One sequence of 10,000 tokens among 255 of 600."""

INT8 = tuple(f"int8-{size}" for size in (64, 131, 256))
"""So many sequences, with K and V of 8 bits."""

PLAIN = (*SIZES, LONG)
ALL = (*PLAIN, *INT8)
INT8_SHAPE = "int8_pair_tile", "int8_programs_per_sm"
SHAPE = "decode_tile", "decode_warps", "decode_stages", "decode_programs_per_sm"
MOVES: tuple[tuple[dict[str, Any], tuple[int | str, ...]], ...] = (
    *(({"dependent_launch": own}, (1, 4, 16)) for own in (0, 1, 2)),
    *(  # before what changes the shape of all decode attention: these are compiled in the shape of the default
        (dict(zip(INT8_SHAPE, own, strict=True)), INT8) for own in ((0, 3), (0, 4), (32, 3), (32, 4), (64, 3), (64, 4))
    ),
    *(({"swapped_rows": own}, (16, 64)) for own in (0, 16, 64)),
    ({"gated_rows": 64}, (64,)),
    ({"gated_rows": 256}, (64, 131, 256)),
    *(
        (dict(zip(SHAPE, own, strict=True)), PLAIN)
        for own in ((32, 4, 7, 4), (32, 4, 5, 4), (32, 4, 5, 5), (64, 4, 5, 3))
    ),
    *(({"dependent_rows": own}, (16, 64, 131, 256, LONG)) for own in (4, 16, 64, 1 << 20)),
    ({"heads_in_product": 1}, (1, 4)),
    *(({"weights_ahead": own}, (1, 4)) for own in (1, 2)),
    *(({"fused_mlp": how, "mlp_depends": own}, (1,)) for how, own in ((1, 0), (2, 0), (1, 1), (2, 1))),
)
"""What is tried, in this order, and in which steps it can make a difference."""

SUSPECTS: tuple[dict[str, Any], ...] = (
    {"gated_rows": 0},
    *({name: 0} for name in ("mlp_depends", "fused_mlp", "heads_in_product", "weights_ahead", "swapped_rows")),
    {"dependent_launch": 1},
    {"dependent_launch": 0},
)
"""What is given up, one after the other, while replays differ."""

GAIN = 0.005
"""A move is kept if the steps that it concerns take so much less time, in their geometric mean."""
LOSS = 0.04
"""And if none of them takes so much more."""

PARTS = "edges", "variants", "prompts", "specialized", "drawing", "quantized", "flash-attn 4"
REPLAYS = 200
ROUNDING = 2.0
"""A variant may be so many times as far from the default as that is from float32."""


@dataclass
class Case:
    """One size of step: two steps with the same shapes, which take turns, so that nothing that is left from one is right for the
    other; and the default's logits of both."""

    chain: Chain
    steps: tuple[Inputs, Inputs]
    logits: tuple[Tensor, Tensor]
    least: float  # seconds: of reading weights and K/V once


class Chooser:
    """Times and compares tunings on one chain."""

    def __init__(self, args: argparse.Namespace, report: Report, chain: Chain, ceiling: Ceiling):
        self.args, self.report, self.chain = args, report, chain
        self.cases: dict[int | str, Case] = {}
        chains = {False: chain}
        for size in args.sizes:
            if (int8 := is_int8(size)) not in chains:
                chains[int8] = new_chain(args, chain.device, int8_kv=int8)
            chain, lens = chains[int8], lens_of(size, args.scale)
            kv_bytes = kv_bytes_per_token(chain.kv[0], BLOCK_SIZE, len(chain.kv))
            limit = ModelLimit(chain.config, chain.dtype.itemsize, kv_bytes)
            chain.tune(DEFAULTS)
            steps = chain.inputs(lens), chain.inputs(lens).turned()
            with torch.inference_mode():
                logits = chain.run(steps[0]).clone(), chain.run(steps[1]).clone()
            least = limit.seconds(StepWork(len(lens), len(lens), sum(lens), sum(lens)), ceiling)
            self.cases[size] = Case(chain, steps, logits, least)
        self.times: dict[tuple[Tuning, int | str], float] = {}
        self.rounding = self._rounding()

    def _rounding(self) -> float:
        """How far the default's logits are from those of float32: the root of the mean square, in standard deviations."""
        size = self.args.sizes[0]
        lens = lens_of(size, self.args.scale)
        exact = Chain(self.args.shape, self.chain.device, torch.float32, sum(lens))
        same = Chain(self.args.shape, self.chain.device, self.chain.dtype, sum(lens))
        with torch.inference_mode():
            found = distance(same.run(same.inputs(lens)), exact.run(exact.inputs(lens)))
        self.report.add({"work": "rounding"}, {"distance": found})
        assert found < 0.1, f"the default's logits are {found:.3g} standard deviations from those of float32"
        return found

    def seconds(self, tuning: Tuning, size: int | str) -> float:
        """Of one step; infinity if it is wrong, or does not run here."""
        if (tuning, size) not in self.times:
            try:
                self.times[tuning, size] = self._measure(tuning, size)
            except Exception as error:  # Triton and torch have none in common
                self._say(f"left out: {changed(tuning)} at {size}: {type(error).__name__}: {str(error)[:200]}")
                self.times[tuning, size] = math.inf
        return self.times[tuning, size]

    @torch.inference_mode()
    def _measure(self, tuning: Tuning, size: int | str) -> float:
        case = self.cases[size]
        case.chain.tune(tuning)
        place = case.steps[0].clone()
        work = case.chain.record(place)
        for step, expected in zip(case.steps, case.logits, strict=True):
            place.copy_(step)
            error = distance(work(), expected)
            if not error <= max(ROUNDING * self.rounding, 1e-4):
                self._say(f"wrong: {changed(tuning)} at {size}: {error:.3g} standard deviations from the default")
                return math.inf
        found = seconds(self.chain.device, work, self.args.repeat)
        self.report.add(
            {"work": "chain", "sequences": size, "tuning": changed(tuning)},
            {"us": 1e6 * found, "limit_share": case.least / found},
        )
        return found

    def is_better(self, new: Tuning, old: Tuning, sizes: Sequence[int | str]) -> bool:
        ratios = [self.seconds(new, size) / self.seconds(old, size) for size in sizes]
        return math.prod(ratios) ** (1 / len(ratios)) < 1 - GAIN and max(ratios) < 1 + LOSS

    def descend(self) -> Tuning:
        best = load_tuning()
        print("from:", changed(best), flush=True)
        for fields, sizes in self.args.moves:
            new, concerned = replace(best, **fields), [size for size in sizes if size in self.cases]
            if new != best and concerned and self.is_better(new, best, concerned):
                best = new
                print("kept:", changed(best), flush=True)
        return best

    @torch.inference_mode()
    def races(self, tuning: Tuning) -> int:
        """Replays whose logits or K/V are not those of the same kernels one after the other, of steps that take turns."""
        total = 0
        for size, case in self.cases.items():
            wrong = 0
            chain = case.chain
            chain.tune(replace(tuning, dependent_launch=0))
            place = case.steps[0].clone()
            work = chain.record(place)
            expected = []
            for step in case.steps:
                place.copy_(step)
                expected.append((work().clone(), chain.written(step)))
            for late in (0, LATE):
                chain.tune(replace(tuning, dependent_launch=tuning.dependent_launch + late))
                work = chain.record(place)
                for replay in range(self.args.replays if not late else self.args.replays // 10):
                    step, (logits, written) = case.steps[replay % 2], expected[replay % 2]
                    place.copy_(step)
                    same = torch.equal(work(), logits) and torch.equal(chain.written(step), written)
                    wrong += not same
            self.report.add({"work": "races", "sequences": size, "tuning": changed(tuning)}, {"wrong": float(wrong)})
            total += wrong
        return total

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self.report.warn(text)


def is_int8(size: int | str) -> bool:
    """Whether K and V of such a step have 8 bits."""
    return str(size).startswith("int8-")


def lens_of(size: int | str, scale: int) -> list[int]:
    if is_int8(size):
        return lens_of(int(str(size).removeprefix("int8-")), scale)
    if size == LONG:
        return [max(2, 600 // scale)] * 255 + [max(2, 10_000 // scale)]
    return [max(2, 1088 // scale)] if size == 1 else [max(2, n) for n in lens_of_workload(int(size), scale)]


def tokens_of(sizes: Sequence[int | str], scale: int) -> int:
    """Of K/V, so that any of these steps has room."""
    return max(sum(lens_of(size, scale)) for size in sizes)


def new_chain(
    args: argparse.Namespace, device: torch.device, *, int8_kv: bool = False, num_layers: int | None = None
) -> Chain:
    """With K and V for all steps of that kind."""
    num_tokens = tokens_of([size for size in args.sizes if is_int8(size) == int8_kv] or args.sizes, args.scale)
    return Chain(args.shape, device, getattr(torch, args.dtype), num_tokens, num_layers, int8_kv=int8_kv)


def distance(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square of the difference, in standard deviations; infinity where something is not finite."""
    difference = ((found - expected).square().mean().sqrt() / expected.std()).item()
    return difference if math.isfinite(difference) else math.inf


def changed(tuning: Tuning) -> str:
    """In what it is not the default."""
    own = {name: value for name, value in asdict(tuning).items() if value != getattr(DEFAULTS, name)}
    return ", ".join(f"{name} {value}" for name, value in own.items()) or "default"


def variants(moves: Any) -> Iterator[tuple[Tuning, Any]]:
    """Those that the descent meets if every move is kept."""
    yield DEFAULTS, ALL
    tuning = load_tuning()
    yield tuning, ALL
    for fields, sizes in moves:
        tuning = replace(tuning, **fields)
        yield tuning, sizes


@torch.inference_mode()
def warm(args: argparse.Namespace, device: torch.device) -> None:
    """Launch a part of all variants once, in a model of two layers."""
    work: list[tuple[Tuning, int | str]] = [(of_prompts(DEFAULTS, *kind), PROMPT) for kind in product(RELEVANT, TILES)]
    work += [(tuning, size) for tuning, sizes in variants(args.moves) for size in sizes if size in args.sizes]
    mine, of = args.warm
    if mine == of - 1 and specializes_warps(device):
        specialized_kernels(["--warm"])
        return
    if mine == of - 2:
        compile_flash(args.shape, device, getattr(torch, args.dtype))
    chains: dict[bool, Chain] = {}
    for tuning, size in work[mine :: of - specializes_warps(device)]:
        if (int8 := size != PROMPT and is_int8(size)) not in chains:
            chains[int8] = new_chain(args, device, int8_kv=int8, num_layers=2)
        chain = chains[int8]
        try:
            chain.tune(tuning)
            if size == PROMPT:
                q, runs = chain.queries([min(args.prompts)], [min(args.prompts)])
                chain.backend.prefill(q, chain.kv[0], runs, chain.spec)
            else:
                chain.run(chain.inputs(lens_of(size, args.scale)))
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # it will be said once, where it is measured
            print(changed(tuning), size, type(error).__name__, str(error)[:300])


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    device = torch.device(args.device)
    torch.manual_seed(0)
    args.moves = MOVES
    if device.type != "cuda":  # the interpreter launches nothing early
        args.moves = [move for move in MOVES if "dependent_launch" not in move[0]][: args.most_moves]
    if args.warm:
        warm(args, device)
        return 0
    report = Report("gpu_choose", device_facts(device))
    rates = measure_rates(device, getattr(torch, args.dtype))
    report.add({"work": "(device)"}, rates.figures)
    chain = new_chain(args, device)
    best = load_tuning()
    parts: dict[str, Callable[[Tuning], Tuning]] = {
        "edges": lambda tuning: edges(chain, report, tuning, lens_of(1, args.scale), args.repeat),
        "variants": lambda _: fastest(Chooser(args, report, chain, rates.ceiling)),
        "prompts": lambda tuning: prompts(chain, report, tuning, args.prompts, args.repeat),
        "specialized": lambda tuning: specialized(report, tuning) if specializes_warps(device) else tuning,
        "drawing": lambda tuning: draws(chain, report, tuning, args.draws, args.repeat),
        "quantized": lambda tuning: quantized(device, args.quantized_shape, chain.dtype, report, tuning, args),
        "flash-attn 4": lambda tuning: flash_prompts(chain, report, tuning, args),
    }
    for name in args.parts:
        with kept_going(report, name):
            best = parts[name](best)
        keep(args, report, best)  # after each part: one may be the last that this process can run
    report.show()
    return 1 if set(report.facts.get("failed", [])) - {"edges"} else 0  # which choose nothing


def fastest(chooser: Chooser) -> Tuning:
    """The end of the descent, less what makes bits differ."""
    best, suspects = chooser.descend(), iter(SUSPECTS)
    while wrong := chooser.races(best):
        chooser.report.warn(f"{changed(best)}: {wrong} replays differ")
        best = next(new for own in suspects if (new := replace(best, **own)) != best)
    for size in chooser.cases:
        before, after = (1e6 * chooser.seconds(tuning, size) for tuning in (DEFAULTS, best))
        chooser.report.add({"work": "step", "sequences": size}, {"before_us": before, "after_us": after})
    return best


def keep(args: argparse.Namespace, report: Report, best: Tuning) -> None:
    report.facts["chosen"] = asdict(best)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    args.tuning.mkdir(parents=True, exist_ok=True)
    (args.tuning / file_name(name)).write_text(json.dumps(asdict(best), indent=1) + "\n")
    report.save(args.save)


def _size(text: str) -> int | str:
    if is_int8(text):
        positive_int(text.removeprefix("int8-"))
        return text
    return LONG if text == LONG else positive_int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_choose", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of the model (default: %(default)s)")
    parser.add_argument("--quantized-shape", default="qwen3-4b", choices=SHAPES, help="(default: %(default)s)")
    parser.add_argument("--sizes", type=_size, nargs="+", default=list(ALL), help="sequences of a step")
    parser.add_argument("--scale", type=positive_int, default=1, help="divides the lengths of sequences (default: 1)")
    parser.add_argument("--repeat", type=positive_int, default=20, help="replays that are timed (default: 20)")
    parser.add_argument("--replays", type=positive_int, default=REPLAYS, help="that must agree to the bit")
    parser.add_argument("--prompts", type=positive_int, nargs="*", default=[128, 256, 512, 1024, 2048, 4096, 16384])
    parser.add_argument("--draws", type=positive_int, nargs="*", default=[1, 256], help="rows of logits")
    parser.add_argument("--most-moves", type=positive_int, help="on a CPU, the first of them (default: all)")
    parser.add_argument(
        "--warm", type=int, nargs=2, metavar=("I", "N"), help="only compile part I of N of all variants"
    )
    parser.add_argument("--tuning", type=Path, default=Path("tuning"), help="folder of what is chosen")
    parser.add_argument("--save", type=Path, default=Path("choose.json"), help="write the JSON here")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
