"""Determinism: the same requests in ways that are drawn, and how many answers differ from those of the first way.

A way is the options of an engine (policy, chunks, blocks, a pool that is nearly too small, prefix cache, swapping, drafts),
the number of threads and the order in which requests come. Half of the requests are greedy, half draw by their own seeds; half
begin like others. `different_tokens` counts answers with another text, `different_logprobs` those with any other bit in a log
probability of theirs. With --vs, transformers answers the greedy ones too: alone, and in batches of 8 and 32.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.options import add_model_options, add_run_options, engine_options, positive_int
from benchmarks.progress import bar
from benchmarks.report import Report
from benchmarks.session import checkpoint
from benchmarks.workload import random_tokens
from nanoengine import LLM, SamplingParams
from nanoengine.core.config import POLICIES
from nanoengine.features.kv_groups.layouts import BlockDemand, group_layers
from nanoengine.models.architectures import read_model_config
from nanoengine.models.description import config_table
from nanoengine.models.names import find_model

Answers = list[tuple[list[int], list[float]]]
"""Of each request: tokens, and the log probability of each."""

BATCHES = (8, 32)
"""Of transformers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    parser.add_argument("--num-seqs", **count, default=1000, help="requests (default: 1000)")
    parser.add_argument("--ways", **count, default=20, help="ways in which all of them are answered (default: 20)")
    parser.add_argument("--input-len", **count, default=300, help="most tokens of a prompt (default: 300)")
    parser.add_argument("--output-len", **count, default=32, help="tokens of an answer (default: 32)")
    parser.add_argument("--vs", choices=["transformers"], help="what it answers to the greedy ones, in batches")
    add_model_options(parser)
    add_run_options(parser, repeat=1)


def run(args: argparse.Namespace, report: Report) -> bool:
    """Returns whether an answer of ours differed."""
    rng, max_len = random.Random(args.seed), args.input_len + args.output_len
    options = engine_options(args) | {"max_model_len": max_len}
    differed = False
    with checkpoint(args, options, max_len) as model, tempfile.TemporaryDirectory() as folder:
        with LLM(model, **options) as llm:
            prompts, models = draw_prompts(rng, args, llm.engine.vocab_size), llm.built.models
            report.facts |= {"parameters": models.num_parameters, "dtype": models.model_config.dtype}
            right = answers_of(llm, prompts, args.output_len, list(range(args.num_seqs)))
        threads = torch.get_num_threads()
        for way in range(1, args.ways):
            drawn = draw_way(rng, Path(folder, str(way)))
            drawn["num_kv_blocks"] = least_blocks(model, drawn, max_len) + rng.choice([3, 3000])
            torch.set_num_threads(rng.randint(1, threads))
            order, start = rng.sample(range(args.num_seqs), args.num_seqs), perf_counter()
            with LLM(model, **options | drawn, use_tqdm=False) as llm:
                found = answers_of(llm, prompts, args.output_len, order, f"way {way}")
                metrics = llm.metrics
            figures = differences(right, found)
            differed |= any(figures.values())
            report.add({"way": way, "how": " ".join(map(str, drawn.values()))}, figures | {
                "seconds": perf_counter() - start,
                "preemptions": metrics.num_preemptions,
                "hit_tokens": metrics.cache.num_hit_tokens,
                "drafts_accepted": metrics.speculation.num_accepted if metrics.speculation else 0,
            })  # fmt: skip
        torch.set_num_threads(threads)
        if args.vs:
            compare_batches(model, prompts[::2], args, report)
    return differed


def draw_prompts(rng: random.Random, args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Every other one begins like some others."""
    beginnings = [random_tokens(rng, args.input_len // 2, vocab_size) for _ in range(8)]
    prompts = []
    for _ in range(args.num_seqs):
        beginning = rng.choice(beginnings)[: rng.choice([0, args.input_len])]
        own = random_tokens(rng, rng.randint(1, args.input_len - len(beginning)), vocab_size)
        prompts.append(beginning + own)
    return prompts


def draw_way(rng: random.Random, folder: Path) -> dict[str, Any]:
    """Options of an engine, but for its pool."""
    tiers: list[dict[str, Any]] = [
        {},
        {"enable_prefix_caching": False},
        {"preemption_mode": "swap", "kv_host_memory": 1 << 26},
        {"kv_disk_path": str(folder)},
    ]
    return {
        "scheduling_policy": rng.choice(POLICIES),
        "async_scheduling": rng.random() < 0.5,
        "max_num_batched_tokens": rng.choice([64, 300, 8192]),
        "long_prefill_token_threshold": rng.choice([None, None, 5, 100]),
        "max_num_seqs": rng.choice([4, 16, 256]),
        "block_size": 16 * rng.choice([1, 1, 2, 3]),
        "speculation": rng.choice([None, "ngram", "ngram"]),
        "enforce_eager": rng.random() < 0.3,
        **rng.choice(tiers),
    }


def least_blocks(model: str, options: dict[str, Any], max_len: int) -> int:
    """Blocks that one sequence of this length needs."""
    config = read_model_config(config_table(find_model(model)))
    groups = group_layers([config.layer(number).window for number in range(config.num_layers)])
    most_new = min(options["long_prefill_token_threshold"] or max_len, options["max_num_batched_tokens"])
    return BlockDemand(groups, options["block_size"], most_new, depth=2).num_blocks(max_len)


def answers_of(
    llm: LLM, prompts: list[list[int]], output_len: int, order: list[int], label: str | None = None
) -> Answers:
    """In the order of the prompts, whatever the order in which they are sent."""
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=output_len, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=label is None)
    found: Answers = [([], [])] * len(prompts)
    for i, output in zip(order, outputs, strict=True):
        [answer] = output.outputs
        assert answer.logprobs is not None
        chosen = zip(answer.token_ids, answer.logprobs, strict=True)
        found[i] = answer.token_ids, [entry[token].logprob for token, entry in chosen]
    return found


def differences(right: Answers, found: Answers) -> dict[str, float]:
    pairs = list(zip(right, found, strict=True))
    return {
        "different_tokens": sum(a[0] != b[0] for a, b in pairs),
        "different_logprobs": sum(a[1] != b[1] for a, b in pairs),
    }


# ---- the peer


def compare_batches(model: str, prompts: list[list[int]], args: argparse.Namespace, report: Report) -> None:
    """What transformers answers to the greedy requests, in batches beside one at a time."""
    from benchmarks.peers import load_in_transformers

    peer: Any = load_in_transformers(find_model(model), "auto" if args.dtype == "auto" else args.dtype).eval()
    peer.generation_config.eos_token_id = None
    alone = _generate(peer, prompts, args.output_len, 1)
    for size in BATCHES:
        found = _generate(peer, prompts, args.output_len, size)
        report.add({"batch": size, "requests": len(prompts)}, differences(alone, found), "transformers")


@torch.inference_mode()
def _generate(peer: Any, prompts: list[list[int]], output_len: int, size: int) -> Answers:
    found: Answers = []
    for first in bar(f"transformers by {size}", range(0, len(prompts), size)):
        rows = [torch.tensor(prompt) for prompt in prompts[first : first + size]]
        ids = pad_sequence(rows, batch_first=True, padding_value=0, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        out = peer.generate(
            ids, attention_mask=mask, max_new_tokens=output_len, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        tokens = out.sequences[:, ids.shape[1] :]
        logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        found += zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return found
