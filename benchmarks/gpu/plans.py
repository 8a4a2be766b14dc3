"""Which stages the calls of gpu.sh have, and how long each may take: less than nine and a half minutes in all."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.stages import DONE, Ledger, Stage

CALLS = ("figures", "tests", "again")
PYTHON = sys.executable
PROCESSES = 14
"""Side by side, each with its compiler."""

VITAL = "what follows would mean nothing"
SMOKE = ("test_attention_at_full_size", "test_sampling_at_full_size", "test_demo_on_gpu")
GPU_TESTS = {
    "test_graphs_on_gpu": 55,
    "test_waiting_on_gpu": 15,
    "test_two_engines_on_gpu": 25,
    "test_precision_on_gpu": 30,
    "test_features_on_gpu": 25,
    "test_quantization_on_gpu": 25,
    "test_hybrids_on_gpu": 40,
    "test_engine_on_gpu": 55,
    "test_memory_on_gpu": 55,  # last: it fills the card
}
"""Seconds of each file; each has a process of its own, which an illegal access would poison."""

PARTS_OF_ENGINE = ("equal tokens", "one stream", "workload", "decode", "start-up")
"""What is not quantized: that has a stage of its own, behind what is wanted more."""

TRITON_TESTS = ("tests/kernels/triton", "tests/kernels/test_contract.py")
PYTEST = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfEs"]

SHORT_RUN = """
from nanoengine import LLM, SamplingParams
llm = LLM("demo", dtype="bfloat16", enforce_eager=True, max_model_len=128, num_kv_blocks=32, use_tqdm=False)
params = [SamplingParams(max_tokens=5, top_p=0.9 + 0.1 * i, temperature=0.8 * i, seed=i) for i in range(2)]
print([output.outputs[0].token_ids for output in llm.generate(["To be", "Whether 'tis"], params, use_tqdm=False)])
"""

SMALL_ENGINE = shlex.split(
    "--device cpu --dtype float32 --model demo --option num_kv_blocks=60 --parts 'one stream' --stream-len 8 3 --repeat 1 "
    "--input-len 3 9 --output-len 2 4 --decode-len 4 --decode-steps 2"
)
SMALL_BENCH = shlex.split("--device cpu --dtype float32 --shape tiny --repeat 1 --ragged 2 --scale 100")
SMALL_WARM = shlex.split("--device cpu --dtype float32 --shape tiny")
SMALL_KERNELS = [
    *SMALL_BENCH,
    *shlex.split("--parts ragged rows placing states --batch 2 --context 16 --rows 3 --prompt 5"),
]
INTERPRETED = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def stages_of(call: str, ledger: Ledger, *, miniature: bool) -> list[Stage]:
    """In their order."""
    if call == "tests":
        return _small_tests() if miniature else _tests()
    stages = _small_figures() if miniature else _figures()
    if call == "again":
        once = ("warm",) if miniature else ()
        passed = [name for name in once if ledger.state("figures", name) == DONE]
        stages = [stage for stage in stages if stage.name not in passed]
    return stages


def _figures() -> list[Stage]:
    model = ["--random-weights", "qwen3-0.6b", "--option", "max_model_len=4096"]
    smoke = [f"tests/gpu/{name}.py" for name in SMOKE]
    return [
        Stage("warm", 40, _module("warm", "--processes", str(PROCESSES))),
        Stage("smoke", 60, [*PYTEST, "-x", "--durations=5", *smoke], vital=True),
        Stage("engine", 250, _module("engine", *model, "--parts", *PARTS_OF_ENGINE), saves=True),
        Stage("kernels", 150, _module("kernels"), saves=True),
        Stage("quantized", 40, _module("engine", *model, "--parts", "quantized"), saves=True),
    ]


def _tests() -> list[Stage]:
    sanitizer = [*shlex.split("compute-sanitizer --tool memcheck --error-exitcode 9"), PYTHON, "-c", SHORT_RUN]
    own_memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor has bounds
    ncu = shlex.split("ncu --clock-control none --kernel-name regex:_decode_kernel --launch-skip 3 --launch-count 1")
    ncu += [f"--section={name}" for name in ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy")]
    ncu += _module("kernels", *shlex.split("--parts decode --batch 64 --context 2048 --repeat 1"))
    engines = [
        Stage(name, seconds, [*PYTEST, "-v", "--durations=5", f"tests/gpu/{name}.py"])
        for name, seconds in GPU_TESTS.items()
    ]
    return [
        Stage("triton", 130, _side_by_side(TRITON_TESTS, PROCESSES)),
        *engines,
        Stage("memcheck", 25, sanitizer, program="compute-sanitizer", environment=own_memory),
        Stage("tune", 50, _module("tune"), saves=True),
        Stage("ncu", 10, ncu, program="ncu"),
    ]


def _small_figures() -> list[Stage]:
    smoke = "tests/gpu/test_attention_at_full_size.py::test_prefills"
    return [
        Stage("warm", 60, _module("warm", *SMALL_WARM), environment=INTERPRETED),
        Stage("smoke", 60, [*PYTEST, "-x", "--noconftest", smoke], vital=True, environment=INTERPRETED),
        Stage("engine", 60, _module("engine", *SMALL_ENGINE), saves=True),
        Stage("kernels", 60, _module("kernels", *SMALL_KERNELS), saves=True),
    ]


def _small_tests() -> list[Stage]:
    """Some that need no GPU, and a program that no machine has."""
    quick = _side_by_side(["tests/kernels/triton/test_tuning.py"], 1, "--noconftest")
    return [
        Stage("triton", 60, quick, environment=INTERPRETED),
        Stage("memcheck", 10, ["program-of-a-gpu"], program="program-of-a-gpu"),
        Stage("tune", 60, _module("tune", *SMALL_BENCH, "--candidates", "2"), saves=True, environment=INTERPRETED),
    ]


def _module(name: str, *arguments: str) -> list[str]:
    return [PYTHON, "-m", f"benchmarks.gpu.{name}", *arguments]


def _side_by_side(paths: Sequence[str], processes: int, *options: str) -> list[str]:
    """Tests in so many processes: one by one where pytest can do that, otherwise file by file."""
    pytest = [*PYTEST, *options]
    if processes > 1 and importlib.util.find_spec("xdist") is not None:
        return [*pytest, "-n", str(processes), "--dist", "worksteal", *paths]
    files = [str(file) for path in map(Path, paths) for file in (sorted(path.glob("test_*.py")) or [path])]
    each = f"xargs -P {processes} -n 1 {shlex.join(pytest)}"
    return ["bash", "-c", f'printf "%s\\n" "$@" | {each}', "bash", *files]
