"""One number: a token and its log probability follow from weights, prompt, parameters and seed alone, to the bit.

A model, requests and ways to run them are drawn: any family, dtype and quantization; parameters of every kind, adapters, and
embeddings of prompts beside texts; and of an engine
its policy, chunks, blocks, pool, tiers, drafts, overlap, recordings, threads, and where its runner is. Then it is disturbed:
requests come one by one, some are aborted, and a step fails. Right is what each request gets alone, its prompt computed whole, by
one thread, without cache. The native kernels promise it to the bit; torch, and the packages for GPUs, nearly.

python -m tests.e2e.one_number FIRST COUNT draws so many and counts what has happened.
"""

from __future__ import annotations

import math
import pickle
import random
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks import determinism
from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.core.messages import Launched, StepPlan, StepResult
from nanoengine.core.sequence import Request
from nanoengine.errors import NotFiniteLogits
from nanoengine.features.kv_groups.layouts import BlockDemand, group_layers
from nanoengine.features.pooling.pooler import EMBEDDING
from nanoengine.interrupts import Interruptible
from nanoengine.models import capability as models
from tests.e2e.drawn_models import MAX_LEN, Model, checkpoint, draw_model, opened
from tests.e2e.drawn_requests import (
    Asked,
    assert_close,
    assert_same,
    draw_embedding,
    draw_request,
    embeddings_of,
    is_close,
    looks_back,
    make_requests,
    run,
    write_adapters,
)
from tests.e2e.faults import CTRL_C, POINTS, Saboteur
from tests.e2e.late import late_device
from tests.e2e.small_engine import assert_idle, step
from tests.features.speculation.scripted import HARM, Scripted
from tests.features.speculation.test_every_way import knowing
from tests.models.families import WITH_STATES
from tests.support import model_runner, threads


class Case(NamedTuple):
    """What is asked of a model, and what each gets alone."""

    model: Model
    folder: Path
    requests: list[Asked]
    beams: list[list[int]]
    alone: list[Request]
    right: list[RequestOutput]  # of the requests, then of the beams
    embedded: list[tuple[Asked, np.ndarray[Any, Any]]]  # prompts, and their embeddings


def draw_way(rng: random.Random, model: Model, folder: Path) -> dict[str, Any]:
    """Options of an engine, but for its pool; chunks and batches that are small even for these models."""
    sizes = [256, 512] if model.package else [16, 16, 32, 48, 128] if model.is_exact else [3, 4, 16, 48]
    return determinism.draw_way(rng, folder) | {
        "max_num_batched_tokens": rng.choice([7 if model.is_exact else 24, 64, 300, 8192]),
        "max_num_seqs": rng.choice([4, 6, 256]),
        "block_size": rng.choice(sizes),
        "num_drafts": rng.randint(2, 15),
        "fair_shares": rng.choice([True, True, False]),
    }


def draw_snapshots(rng: random.Random, case: Case) -> dict[str, Any]:
    """Of a model with states; at times there is room for a few, and the others go where blocks go."""
    if case.model.shape not in WITH_STATES:
        return {}
    config = models.describe(case.folder, None).config
    assert config.states is not None
    size = 4 * config.num_state_layers * sum(map(math.prod, config.states.shapes))
    return {"snapshot_memory": rng.choice([1, 3, 1000]) * size}


def least_blocks(folder: Path, options: dict[str, Any]) -> int:
    """Blocks that one sequence of the greatest length needs."""
    config = models.describe(folder, None).config.within(MAX_LEN)
    groups = group_layers([config.layer(number).window for number in config.attention_layers] or [None])
    most_new = min(options["long_prefill_token_threshold"] or 8192, options["max_num_batched_tokens"])
    return BlockDemand(groups, options["block_size"], most_new, 1 + options["async_scheduling"]).num_blocks(MAX_LEN)


class Elsewhere:
    """An executor that sends plans to the runner of another engine, which knows nothing but their bytes."""

    def __init__(self, llm: LLM):
        self.executor = model_runner(llm)

    def launch(self, plan: StepPlan) -> Launched:
        launched = self.executor.launch(pickle.loads(pickle.dumps(plan)))

        def result() -> StepResult:
            found: StepResult = pickle.loads(pickle.dumps(launched()))
            return found

        return result

    def close(self) -> None:
        self.executor.close()


def check_one_number(seed: int, folder: Path) -> Counter[str]:
    """Draw a model and requests, and run them in a way, which is crowded for every other seed; returns what happened."""
    rng, seen = random.Random(seed), Counter[str]()
    model = draw_model(rng)
    requests = [draw_request(rng, model) for _ in range(8)]
    beams = [asked.prompt for asked in requests[:1] if rng.random() < 0.3]
    alone: dict[str, Any] = {"max_num_seqs": 3, "enable_prefix_caching": False, "async_scheduling": False}
    alone |= {"block_size": 256, "num_kv_blocks": 30} if model.package else {"num_kv_blocks": 800}
    with checkpoint(folder, model) as path:
        with threads(1), opened(model, path, enforce_eager=True, num_threads=1, **alone) as llm:
            requests = give_adapters(llm, requests, folder / "adapters", seed)
            made = make_requests(llm, requests)
            right = [run(llm, [request])[0] for request in made] + [run(llm, [], [prompt])[0] for prompt in beams]
            embedded = [draw_embedding(random.Random(f"{seed} embeds {number}")) for number in range(3)]
            vectors = [embeddings_of(llm, [asked])[0] for asked in embedded]
            case = Case(model, path, requests, beams, made, right, [*zip(embedded, vectors, strict=True)])
            check_sent_again(llm, case, seen)
        (where := folder / "way").mkdir()
        run_in_a_way(case, rng, where, seen, is_crowded=seed % 2 == 0)
    seen["cases"] += 1
    return seen


def give_adapters(llm: LLM, requests: list[Asked], folder: Path, seed: int) -> list[Asked]:
    """Some of them."""
    rng = random.Random(f"{seed} adapts")
    adapters = write_adapters(llm, folder, rng)
    return [asked._replace(adapter=rng.choice([None, *adapters])) for asked in requests]


def run_in_a_way(case: Case, rng: random.Random, folder: Path, seen: Counter[str], *, is_crowded: bool) -> None:
    options = draw_way(rng, case.model, folder) | draw_snapshots(rng, case)
    least = least_blocks(case.folder, options)
    options["num_kv_blocks"] = least + 3 if is_crowded and not case.beams else 12 * least  # beams ask for room for all
    options["num_threads"] = 2 if rng.random() < 0.2 else 1
    is_late, is_elsewhere, records = rng.random() < 0.3, rng.random() < 0.3, options["max_num_seqs"] < 256
    try:
        with ExitStack() as stack:
            stack.enter_context(threads(options["num_threads"]))
            late = late_device(can_record=records, seed=rng.randrange(99))
            device = stack.enter_context(late) if is_late else None
            other = stack.enter_context(opened(case.model, case.folder, **options)) if is_elsewhere else None
            llm = stack.enter_context(opened(case.model, case.folder, **options))
            if other is not None:
                model_runner(llm).close()
                assert isinstance(llm.engine.executor, Interruptible)
                llm.engine.executor.executor = Elsewhere(other)
            if options["speculation"]:
                teach(llm, case, rng)
            check_together(llm, case, rng)
            disturb(llm, case, rng, seen, POINTS if is_late or rng.random() < 0.8 else CTRL_C)
            check_together(llm, case, rng)  # now with what was left in the cache
            if rng.random() < 0.5:
                check_sent_again(llm, case, seen)
            check_resumed(llm, case, rng, seen)
            note(seen, llm)
        if "kv_disk_path" in options and case.model.shape in WITH_STATES:  # and what is in files is found
            with opened(case.model, case.folder, **options) as llm:
                check_together(llm, case, rng)
                note(seen, llm, again="again ")
    except BaseException as error:
        error.add_note(f"{case.model}, {options}")
        raise
    seen.update(
        tokens=2 * sum(len(own.token_ids) for output in case.right for own in output.outputs),
        several=2 * sum(len(output.outputs) > 1 for output in case.right),
        constrained=sum(asked.params.structured_outputs is not None for asked in case.requests),
        adapted=sum(asked.adapter is not None for asked in case.requests),
        overlapping=device.num_overlapping if device else 0,
        replayed=sum(recording.num_replays for recording in device.recordings) if device else 0,
        elsewhere=is_elsewhere,
        ways=1,
    )


def teach(llm: LLM, case: Case, rng: random.Random) -> None:
    """Let an engine guess for itself, or by somebody who has read the answers, and errs or means harm."""
    speculation = llm.built.capabilities["speculation"].speculation
    assert speculation is not None
    speculation.step_tokens = 1000
    if rng.random() < 0.7:
        speculation.proposer = Scripted(HARM[rng.choice(sorted(HARM))](knowing(case.alone)))


def note(seen: Counter[str], llm: LLM, again: str = "") -> None:
    metrics = llm.metrics
    if (snapshots := llm.built.capabilities["kv_groups"].snapshots) is not None:
        seen.update({f"{again}states": snapshots.num_restored, f"{again}states loaded": snapshots.num_loaded})
    seen.update(preemptions=metrics.num_preemptions, hits=metrics.cache.num_hit_tokens)
    if (stats := metrics.speculation) is not None:
        seen.update(accepted=stats.num_accepted, rejected=stats.num_drafts - stats.num_accepted)
        seen.update(postponed=stats.num_postponed)
    if (offload := metrics.offload) is not None:
        seen.update(saved=offload.num_saved_blocks + offload.num_written_files)
        seen.update(loaded=offload.num_loaded_blocks + offload.num_loaded_files)


# ---- what must hold


def check_together(llm: LLM, case: Case, rng: random.Random) -> None:
    """All at once, in any order."""
    order = rng.sample(range(len(case.requests)), len(case.requests))
    embedded = make_requests(llm, [asked for asked, _ in case.embedded])
    for request in embedded:
        llm.engine.submit(request)
    found = run(llm, make_requests(llm, [case.requests[i] for i in order], rng), case.beams)
    for own, i in zip(found, [*order, *range(len(order), len(case.right))], strict=True):
        assert_same(own, case.right[i], case.model.within)
    for request, (_, right) in zip(embedded, case.embedded, strict=True):
        found_vector = request.sequences[0].state[EMBEDDING]
        np.testing.assert_allclose(found_vector, right, rtol=0, atol=20 * case.model.within * (np.abs(right).max()))


def disturb(llm: LLM, case: Case, rng: random.Random, seen: Counter[str], points: dict[str, Any]) -> None:
    """Requests come one by one, some are aborted, a step fails: who is spared says what it says alone, others its beginning."""
    made = make_requests(llm, case.requests, rng)
    nth = rng.choice([1, 1, 1, 2, 3, 5, 9])  # beginnings have most to go wrong
    saboteur = Saboteur(llm, points[rng.choice(sorted(points))], rng.choice(made), nth)

    def go_on() -> None:
        try:
            step(llm)
        except KeyboardInterrupt:
            seen["interrupted"] += 1

    with pytest.MonkeyPatch.context() as patch:
        saboteur.lie_in_wait(patch)
        for place in rng.sample(range(len(made)), len(made)):
            llm.engine.submit(made[place])
            for _ in range(rng.randint(0, 2)):
                go_on()
            if rng.random() < 0.2:
                seen["aborted"] += llm.engine.abort(rng.choice(made).request_id)
        while llm.engine.has_unfinished:
            go_on()
    assert_idle(llm)
    seen["failed"] += len(saboteur.touched)
    for request, alone, right in zip(made, case.alone, case.right, strict=False):
        for seq, expected in zip(request.sequences, alone.sequences, strict=True):
            was_touched = seq in saboteur.touched
            assert seq.finish_reason in ("error", "abort", "stop") if was_touched else seq.finish_reason != "error"
            tokens = seq.output_token_ids
            assert tokens == expected.output_token_ids[: len(tokens)]
            assert seq.finish_reason in ("error", "abort", expected.finish_reason)
        if not any(seq.finish_reason in ("error", "abort") for seq in request.sequences):
            assert_same(request.output(), right, case.model.within)
        failed = any(seq.finish_reason == "error" for seq in request.sequences)
        assert isinstance(request.error, saboteur.point.error or NotFiniteLogits) if failed else request.error is None


def check_sent_again(llm: LLM, case: Case, seen: Counter[str]) -> None:
    """A generated token is as likely as the same token in a prompt, when the whole text is sent."""
    completions = [(output, own) for output in case.right[: len(case.requests)] for own in output.outputs]
    asking = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    adapters = [asked.adapter for asked, output in zip(case.requests, case.right, strict=False) for _ in output.outputs]
    texts = [
        Asked(output.prompt_token_ids + own.token_ids, asking, adapter)
        for (output, own), adapter in zip(completions, adapters, strict=True)
    ]
    for (output, own), again in zip(completions, run(llm, make_requests(llm, texts)), strict=True):
        assert own.logprobs is not None
        assert again.prompt_logprobs is not None
        behind = again.prompt_logprobs[len(output.prompt_token_ids) :]
        for token, entry, other in zip(own.token_ids, own.logprobs, behind, strict=True):
            assert other is not None
            assert is_close(other[token].logprob, entry[token].logprob, case.model.within)
            seen["sent again"] += 1


def check_resumed(llm: LLM, case: Case, rng: random.Random, seen: Counter[str]) -> None:
    """A text that is broken off goes on elsewhere as it would have: with what is known of it as the prompt, and its seed."""
    resumed, expected = [], []
    for (prompt, params, adapter), output in zip(case.requests, case.right, strict=False):
        own = output.outputs[0]
        cut = rng.randint(1, max(1, len(own.token_ids) - 1))
        if cut < len(own.token_ids) and not looks_back(params):
            rest = replace(params, max_tokens=params.max_tokens - cut, prompt_logprobs=None)
            resumed.append(Asked(prompt + own.token_ids[:cut], rest, adapter))
            expected.append((own.token_ids[cut:], (own.logprobs or [])[cut:]))
    for found, (tokens, logprobs) in zip(run(llm, make_requests(llm, resumed)), expected, strict=True):
        assert found.outputs[0].token_ids == tokens
        assert_close(found.outputs[0].logprobs, logprobs, case.model.within)
        seen["resumed"] += 1


def main(first: int, count: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            seen += check_one_number(seed, Path(folder))
        if seed % 10 == 9:
            print(seed, dict(seen), flush=True)
    print(dict(seen))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
