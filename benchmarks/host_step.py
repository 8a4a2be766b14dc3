"""What the host does in one steady decode step: bytecodes and calls, counted without a GPU.

    python -m benchmarks.host_step --num-seqs 1 256

An engine with the demo model, as it is on a GPU: two steps in flight, recorded steps, and tokens drawn by Triton's kernels. Its
kernels and replays cost nothing: Triton compiles for compute capability 9.0, and its driver here launches nothing. So the counts
are of Python alone, the same on every machine with these versions of Python, torch and Triton: what CUDA and Triton's launcher
take is not in them.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.options import positive_int
from benchmarks.report import Report
from nanoengine import LLM, SamplingParams
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling import SamplingTable
from nanoengine.kernels.recording.buckets import Bucket
from nanoengine.kernels.recording.recorded_steps import RecordedSteps
from nanoengine.kernels.triton.draws.repeated import RepeatedDraws
from nanoengine.kernels.triton.tuning import DEPENDENT

MAX_LEN, PROMPT_LEN = 512, 40
TOKEN = 7
"""That is always drawn."""
STEPS = BLOCK_SIZE = 16
"""Steps that are counted: in so many, each sequence takes one new block."""

GROUPS = (
    ("launches", ("/kernels/triton/",)),
    ("numbers", ("/kernels/recording/", "/core/inputs.py")),
    ("runner", ("/core/model_runner.py", "/core/sampler.py", "/core/device.py")),
    ("text", ("detokenizer.py", "tokenizer.py")),
    ("metrics", ("/features/observability/",)),
    ("policy", ("/nanoengine/",)),
    ("Triton", ("/triton/",)),
)
"""Who runs a bytecode, by file; those of other files count as their caller's."""


class Utils:
    """In place of Triton's calls of the CUDA driver."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}

    def unload_module(self, module: int) -> None:
        pass


class Launcher:
    """Launches nothing, and counts."""

    launched = 0

    def __init__(self, source: Any, metadata: Any):
        pass

    def __call__(self, *args: Any) -> None:
        Launcher.launched += 1


class Driver:
    """A GPU that does nothing."""

    utils, launcher_cls = Utils(), Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class NoRecorder:
    """Its replays launch nothing, and give zeros."""

    records_ahead = True

    def __init__(self, logits: Tensor):
        self.logits = logits

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: self.logits


class NoGPU:
    """In place of torch.cuda.device, of the current stream, and of an event."""

    def __init__(self, device: torch.device):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self) -> NoGPU:
        return self

    def synchronize(self) -> None:
        pass


class Drawing:
    """Kernels of an engine whose tokens Triton's draw."""

    def __init__(self, others: Any):
        self._others, self._draws = others, RepeatedDraws()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        launch = DEPENDENT.launch(len(logits))
        return self._draws.choose(logits, table, rows, positions, last_tokens, launch).fill_(TOKEN)


def build(num_seqs: int, top_k: int) -> LLMEngine:
    """An engine in whose steps `num_seqs` sequences decode. Their lengths differ: in each step some take a new block."""
    rows = max(num_seqs, 1)
    llm = LLM(
        "demo",
        device="cpu",
        kernels="torch",
        max_num_seqs=rows,
        max_num_batched_tokens=rows * 2 * PROMPT_LEN,
        max_model_len=MAX_LEN,
        num_kv_blocks=rows * MAX_LEN // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        async_scheduling=True,
        use_tqdm=False,
    )
    runner: Any = llm.engine.executor
    while not hasattr(runner, "sampler"):
        runner = runner.executor
    recorder = NoRecorder(torch.zeros(rows, runner.sampler.vocab_size))
    steps = RecordedSteps(runner, recorder, [Bucket(False, rows, 1)], MAX_LEN)
    steps.record_all(use_tqdm=False)
    runner.recorder, runner.sampler.kernels = steps, Drawing(runner.kernels)
    runner.device.is_cuda, runner.device.host_tensor = True, _host_tensor
    for number in range(num_seqs):
        prompt = [1 + (7 * i + number) % 50 for i in range(PROMPT_LEN + number % BLOCK_SIZE)]
        params = SamplingParams(temperature=0.6, top_k=top_k, ignore_eos=True, max_tokens=MAX_LEN - 2 * PROMPT_LEN)
        llm.engine.submit(llm.engine.make_request(prompt, params))
    return llm.engine


def _host_tensor(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def count(step: Callable[[], object]) -> dict[str, float]:
    """Bytecodes by who runs them, and calls, of one step: the mean of STEPS."""
    found: Counter[str] = Counter()
    groups: dict[FrameType | None, str] = {}

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        group = _group(frame.f_code.co_filename) or groups.get(frame.f_back, "policy")
        groups[frame] = group
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def count_one(frame: FrameType, event: str, _arg: object) -> Any:
            found[group] += event == "opcode"
            if event == "return":
                del groups[frame]
            return count_one

        return count_one

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        if frame.f_code.co_filename != __file__:
            found["calls"] += event in ("call", "c_call")

    launched = Launcher.launched
    for _ in range(STEPS):
        sys.settrace(trace)
        step()
        sys.settrace(None)
    found["bytecodes"] = found.total()
    for _ in range(STEPS):
        sys.setprofile(profile)
        step()
        sys.setprofile(None)
    found["kernels"] = (Launcher.launched - launched) // 2
    return {name: value / STEPS for name, value in sorted(found.items())}


@cache
def _group(path: str) -> str | None:
    return next((name for name, parts in GROUPS if any(part in path for part in parts)), None)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("host_step", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[1, 256], help="(default: 1 256)")
    parser.add_argument(
        "--top-k", type=int, default=0, help="of all sequences: draws then take more kernels (default: 0)"
    )
    parser.add_argument("--save", type=Path, help="write the JSON here")
    args = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: the interpreter launches otherwise")
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(Driver())
    for name in ("device", "current_stream"):
        setattr(torch.cuda, name, NoGPU)
    report = Report(
        "host_step", {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    )
    for num_seqs in args.num_seqs:
        engine = build(num_seqs, args.top_k)
        for _ in range(2 * STEPS):
            engine.step()
        report.add({"sequences": num_seqs}, count(engine.step))
        print(
            report.rows[-1].case,
            {name: round(value) for (name, (value,)) in report.rows[-1].values.items()},
            flush=True,
        )
    if args.save:
        report.save(args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
