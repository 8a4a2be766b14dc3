"""One number: a token and its log probability follow from weights, prompt, parameters and seed alone, to the bit.

A model, requests and ways to run them are drawn: any family, dtype and quantization; parameters of every kind; and of an engine
its policy, chunks, blocks, pool, tiers, drafts, overlap, recordings, threads, and where its runner is. Then it is disturbed:
requests come one by one, some are aborted, and a step fails. Right is what each request gets alone, its prompt computed whole, by
one thread, without cache. The native kernels promise it to the bit; torch, and the packages for GPUs, nearly.

python -m tests.e2e.one_number FIRST COUNT draws so many and counts what has happened.
"""

from __future__ import annotations

import pickle
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks import block_encoder, determinism
from nanoengine import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanoengine.attention import flash_attn
from nanoengine.beam_search.search import beam_search
from nanoengine.core.messages import StepPlan, StepResult
from nanoengine.core.sequence import Request
from nanoengine.errors import NotFiniteLogits
from nanoengine.interrupts import Interruptible
from nanoengine.kernels.native_operations import unsupported_reason
from nanoengine.kv_groups.layouts import Need, group_layers
from nanoengine.models import capability as models
from nanoengine.models.description import Description
from nanoengine.observability.metrics import EngineMetrics
from nanoengine.quantization.at_load import quantizer
from nanoengine.quantization.tensor import QuantizedTensor
from nanoengine.sampling.token_logprobs import TokenLogprobs
from tests.attention.stand_ins import PACKAGES, installed
from tests.e2e.faults import CTRL_C, POINTS, Saboteur
from tests.e2e.late import late_device
from tests.e2e.small_engine import assert_idle, finish, step
from tests.models.families import SHAPES, family_checkpoint
from tests.speculation.scripted import HARM, Scripted
from tests.speculation.test_every_way import Free, knowing
from tests.support import backend_of, fill_kv_with_nan, model_runner, threads

MAX_LEN = 700
SHARED = [(3 * i + 1) % 200 for i in range(530)]
BEGINNINGS = [0, 0, 0, 16, 33, 250, 272, 530]
"""How many tokens prompts have in common: around blocks, and around the parts of 256 into which attention cuts sequences."""
BEAMS = BeamSearchParams(beam_width=3, max_tokens=5)
FEW = [*range(64, 70)]  # "a" to "f"

Asked = tuple[list[int], SamplingParams]

WISHES: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0}],
    "filters": [{}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 40}],
    "bias": [{}, {"logit_bias": {7: 4.0, 30: -4.0, 90: 2.5}}, {"allowed_token_ids": FEW}, {"allowed_token_ids": FEW}],
    "prompt logprobs": [{}, {}, {}, {"prompt_logprobs": 2}],
    "speculate": [{}, {}, {}, {}, {"speculate": False}],
}  # fmt: skip
LOOKING_BACK: dict[str, list[dict[str, Any]]] = {
    "penalties": [
        {},
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"frequency_penalty": -1.0, "repetition_penalty": 0.8},
    ],
    "bad words": [{}, {}, {"bad_words": ["a", "bc", "bbb", "fed"]}, {"bad_words": [chr(i) for i in range(48, 97)]}],
    "stop": [{}, {"stop": ["ba", "fed", "cc"]}, {"stop": ["G", "e"], "min_tokens": 4}, {"stop": ["ab", "dd", "f"]}],
    "end": [{"ignore_eos": True}, {}, {"stop_token_ids": list(range(0, 300, 5)), "min_tokens": 7}],
    "completions": [{}, {}, {}, {"n": 2}, {"n": 3}, {"n": 1, "best_of": 2}],
    "grammar": [{}, {}, {}, {"structured_outputs": {"regex": "[a-f]{9}(bad|[a-f]{30})"}}],
}
"""Of some it matters which of the tokens so far are the prompt's."""


# ---- models


@dataclass(frozen=True)
class Model:
    """What is computed: a shape, how its numbers are kept, and who computes."""

    shape: str
    overrides: dict[str, Any]
    seed: int
    options: dict[str, Any]  # of the engine
    q4_k: bool = False
    package: str = ""  # of attention, for GPUs

    @property
    def is_exact(self) -> bool:
        return self.options["kernels"] == "native"

    @property
    def within(self) -> float:
        """Largest difference between log probabilities: sums that are added in another order are rounded otherwise."""
        return 0.0 if self.is_exact else 1e-4 if self.options["kv_cache_dtype"] == "auto" else 1e-2


THREE_GROUPS = "Llama with two windows and none"
WITHOUT = ("Phi3, partial, long factors", "Phi3, partial, short factors")
"""Shapes whose factors fit one size of a head alone, which native attention does not compute."""
REASON = unsupported_reason(torch.device("cpu"), torch.float32)
"""Why there are no native kernels."""


def draw_model(rng: random.Random) -> Model:
    """Heads that native attention computes, and rows that blocks of every format fill."""
    shape = rng.choice([*(shape for shape in SHAPES if shape not in WITHOUT), *[THREE_GROUPS] * 3])
    own = {} if shape == THREE_GROUPS else SHAPES[shape][1]
    overrides: dict[str, Any] = {"head_dim": rng.choice([32, 64]), "max_position_embeddings": MAX_LEN}
    if own.get("sliding_window"):
        overrides["sliding_window"] = rng.choice([1, 13, 40, 200, 300])
    kv_cache_dtype, seed = rng.choice(["auto", "auto", "int8"]), rng.randrange(1000)
    if rng.random() < 0.2 or REASON is not None:
        options = {"dtype": "float32", "kernels": "torch", "kv_cache_dtype": kv_cache_dtype, "quantization": None}
        if rng.random() < 0.5:
            return Model(shape, overrides, seed, options)
        options |= {"attention_backend": "flash_attn", "kv_cache_dtype": "auto"}
        shape, overrides = rng.choice([THREE_GROUPS, "Mistral, a window"]), overrides | {"sliding_window": 40}
        return Model(shape, overrides, seed, options, package=rng.choice(PACKAGES))
    q4_k = rng.random() < 0.2 and 256 % own.get("num_attention_heads", 4) == 0
    if q4_k:  # blocks of 256
        overrides |= {"hidden_size": 256, "intermediate_size": 256}
    options = {
        "dtype": rng.choice(["float32", "bfloat16", "bfloat16"]),
        "kernels": "native",
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": "int8" if q4_k else rng.choice([None, None, "int8", "int4", "int4-128"]),
        "activation_dtype": rng.choice(["auto", "auto", "float32"]),
    }
    return Model(shape, overrides, seed, options, q4_k)


@contextmanager
def checkpoint(folder: Path, model: Model) -> Iterator[Path]:
    """A folder with the model; inside, its config is what the shape says."""
    if model.shape != THREE_GROUPS:
        yield family_checkpoint(folder, model.shape, seed=model.seed, **model.overrides)
        return
    describe = models.describe

    def described(*where: Path) -> Description:
        """Six layers: two see all, two a window that is smaller than a block of 16, two a longer one."""
        found = describe(*where)
        layer = found.config.layer(0)
        layers = (replace(layer, window=9), layer, replace(layer, window=14))
        return replace(found, config=replace(found.config, layers=layers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "describe", described)
        yield family_checkpoint(folder, "Llama", seed=model.seed, num_hidden_layers=6, **model.overrides)


def in_q4_k(values: Tensor) -> QuantizedTensor:
    """Rows that no blocks fill have 8 bits."""
    return block_encoder.encode(values, "Q4_K") if values.shape[1] % 32 == 0 else quantizer("int8")(values)


@contextmanager
def opened(model: Model, folder: Path, **options: Any) -> Iterator[LLM]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if model.q4_k:
            patch.setattr(models, "quantizer", lambda *_: in_q4_k)
        if model.package:
            stack.enter_context(installed(model.package, exact=True))
            patch.setattr(flash_attn, "triton_unsupported_reason", lambda _: "the interpreter is slow")
        options = {"max_model_len": MAX_LEN, "device": "cpu", **model.options, **options}
        llm = stack.enter_context(LLM(str(folder), use_tqdm=False, **options))
        assert backend_of(llm).name == model.options.get("attention_backend", model.options["kernels"])
        fill_kv_with_nan(llm)
        yield llm


# ---- requests, and what is said


def draw_request(rng: random.Random, model: Model) -> Asked:
    prompt = SHARED[: rng.choice(BEGINNINGS if model.is_exact else BEGINNINGS[:5])]
    prompt += [rng.randrange(256) for _ in range(rng.randint(1, rng.choice([10, 40, 120])))]
    asked: dict[str, Any] = {"seed": rng.randrange(100), "max_tokens": rng.randint(7, 24)}
    wishes = WISHES | (LOOKING_BACK if rng.random() < 0.6 else {})
    for choices in wishes.values():
        asked |= rng.choice(choices)
    return prompt, SamplingParams(**asked | {"logprobs": rng.choice([0, 2])})


def looks_back(params: SamplingParams) -> bool:
    plain, names = SamplingParams(), {name for own in LOOKING_BACK.values() for wish in own for name in wish}
    return any(getattr(params, name) != getattr(plain, name) for name in names - {"ignore_eos", "stop_token_ids"})


def make_requests(llm: LLM, requests: Sequence[Asked], rng: random.Random | None = None) -> list[Request]:
    """With an rng they are those of two clients, some before others."""
    places = [{} if rng is None else {"priority": rng.choice([0, 0, -1]), "client": rng.choice("ab")} for _ in requests]
    return [llm.engine.make_request(*asked, **place) for asked, place in zip(requests, places, strict=True)]


def run(llm: LLM, made: Sequence[Request], beams: Sequence[list[int]] = ()) -> list[RequestOutput]:
    """All requests at once, and beam searches for some prompts beside them."""
    for request in made:
        llm.engine.submit(request)
    searched = beam_search(llm.engine, beams, BEAMS, SamplingParams) if beams else []
    finish(llm)
    assert [request.error for request in made] == [None] * len(made)
    return [*(request.output() for request in made), *searched]


def assert_same(found: RequestOutput, right: RequestOutput, within: float) -> None:
    for own, other in zip(found.outputs, right.outputs, strict=True):
        assert (own.token_ids, own.text, own.index) == (other.token_ids, other.text, other.index)
        assert (own.finish_reason, own.stop_reason) == (other.finish_reason, other.stop_reason)
        assert is_close(own.cumulative_logprob, other.cumulative_logprob, 20 * within)
        assert_close(own.logprobs, other.logprobs, within)
    assert_close(found.prompt_logprobs, right.prompt_logprobs, within)


Entries = Sequence[TokenLogprobs | None] | None


def assert_close(found: Entries, right: Entries, within: float) -> None:
    """The same tokens; where values are the same to the bit, so are ranks, and nearly tied tokens may change theirs otherwise."""
    assert (found is None) == (right is None)
    for own, other in zip(found or (), right or (), strict=True):
        assert (own or {}).keys() == (other or {}).keys()
        for token, entry in (own or {}).items():
            assert other is not None
            assert is_close(entry.logprob, other[token].logprob, within)
            assert within or entry.rank == other[token].rank


def is_close(own: float | None, other: float | None, within: float) -> bool:
    return own == other or (own is not None and other is not None and abs(own - other) <= within)


# ---- ways


class Case(NamedTuple):
    """What is asked of a model, and what each gets alone."""

    model: Model
    folder: Path
    requests: list[Asked]
    beams: list[list[int]]
    alone: list[Request]
    right: list[RequestOutput]  # of the requests, then of the beams


def draw_way(rng: random.Random, model: Model, folder: Path) -> dict[str, Any]:
    """Options of an engine, but for its pool; chunks and batches that are small even for these models."""
    sizes = [256, 512] if model.package else [16, 16, 32, 48, 128] if model.is_exact else [3, 4, 16, 48]
    return determinism.draw_way(rng, folder) | {
        "max_num_batched_tokens": rng.choice([7 if model.is_exact else 24, 64, 300, 8192]),
        "max_num_seqs": rng.choice([4, 6, 256]),
        "block_size": rng.choice(sizes),
        "num_drafts": rng.randint(2, 15),
        "max_client_share": rng.choice([0.1, 0.5, 1.0]),
    }


def least_blocks(folder: Path, options: dict[str, Any]) -> int:
    """Blocks that one sequence of the greatest length needs."""
    config = models.describe(folder, None).config.within(MAX_LEN)
    groups = group_layers([config.layer(number).window for number in range(config.num_layers)])
    most_new = min(options["long_prefill_token_threshold"] or 8192, options["max_num_batched_tokens"])
    return Need(groups, options["block_size"], most_new, 1 + options["async_scheduling"]).num_blocks(MAX_LEN)


class Elsewhere:
    """An executor that sends plans to the runner of another engine, which knows nothing but their bytes."""

    def __init__(self, llm: LLM):
        self.executor = model_runner(llm)

    def launch(self, plan: StepPlan) -> Elsewhere.Launched:
        return self.Launched(self.executor.launch(pickle.loads(pickle.dumps(plan))))

    def close(self) -> None:
        self.executor.close()

    class Launched(NamedTuple):
        launched: Any

        def result(self) -> StepResult:
            found: StepResult = pickle.loads(pickle.dumps(self.launched.result()))
            return found


def check_one_number(seed: int, folder: Path, num_ways: int = 2) -> Counter[str]:
    """Draw a model and requests, and run them in some ways; returns what happened."""
    rng, seen = random.Random(seed), Counter[str]()
    model = draw_model(rng)
    requests = [draw_request(rng, model) for _ in range(8)]
    beams = [prompt for prompt, _ in requests[:1] if rng.random() < 0.3]
    alone: dict[str, Any] = {"max_num_seqs": 3, "enable_prefix_caching": False, "async_scheduling": False}
    alone |= {"block_size": 256, "num_kv_blocks": 30} if model.package else {"num_kv_blocks": 800}
    with checkpoint(folder, model) as path:
        with threads(1), opened(model, path, enforce_eager=True, num_threads=1, **alone) as llm:
            made = make_requests(llm, requests)
            right = [run(llm, [request])[0] for request in made] + [run(llm, [], [prompt])[0] for prompt in beams]
            case = Case(model, path, requests, beams, made, right)
            check_sent_again(llm, case, seen)
        for way in range(num_ways):
            (where := folder / f"way {way}").mkdir()
            run_in_a_way(case, rng, where, seen, is_crowded=way % 2 == 0)
    seen["cases"] += 1
    return seen


def run_in_a_way(case: Case, rng: random.Random, folder: Path, seen: Counter[str], *, is_crowded: bool) -> None:
    options = draw_way(rng, case.model, folder)
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
            note(seen, llm.metrics)
    except BaseException as error:
        error.add_note(f"{case.model}, {options}")
        raise
    seen.update(
        tokens=2 * sum(len(own.token_ids) for output in case.right for own in output.outputs),
        several=2 * sum(len(output.outputs) > 1 for output in case.right),
        constrained=sum(params.structured_outputs is not None for _, params in case.requests),
        overlapping=device.num_overlapping if device else 0,
        replayed=sum(recording.num_replays for recording in device.recordings) if device else 0,
        elsewhere=is_elsewhere,
        ways=1,
    )


def teach(llm: LLM, case: Case, rng: random.Random) -> None:
    """Let an engine guess for itself, or by somebody who has read the answers, and errs or means harm."""
    speculation = llm.built.capabilities["speculation"].speculation
    assert speculation is not None
    speculation.costs = Free()
    if rng.random() < 0.7:
        speculation.proposer = Scripted(HARM[rng.choice(sorted(HARM))](knowing(case.alone)))


def note(seen: Counter[str], metrics: EngineMetrics) -> None:
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
    found = run(llm, make_requests(llm, [case.requests[i] for i in order], rng), case.beams)
    for own, i in zip(found, [*order, *range(len(order), len(case.right))], strict=True):
        assert_same(own, case.right[i], case.model.within)


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
    texts = [(output.prompt_token_ids + own.token_ids, asking) for output, own in completions]
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
    for (prompt, params), output in zip(case.requests, case.right, strict=False):
        own = output.outputs[0]
        cut = rng.randint(1, max(1, len(own.token_ids) - 1))
        if cut < len(own.token_ids) and not looks_back(params):
            rest = replace(params, max_tokens=params.max_tokens - cut, prompt_logprobs=None)
            resumed.append((prompt + own.token_ids[:cut], rest))
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
