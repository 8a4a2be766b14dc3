"""Speculative decoding: what is compared with what, and the same text in fewer steps.

python examples/speculation.py
"""

from typing import Any

import torch

from nanoengine import LLM, SamplingParams
from nanoengine.core.randomness import sequence_seed
from nanoengine.core.sampling import gumbel_noise, position_keys, signed
from nanoengine.core.scheduler import Step
from nanoengine.sampling.token_logprobs import TokenLogprobs
from nanoengine.speculation.ngram import NgramProposer

PROMPT = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def add(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def sub(self, other):
        return Point(self.x"""
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "use_tqdm": False}
SEED = 5


def noise_of(seed: int, position: int, token_ids: list[int]) -> list[float]:
    """What the engine adds to the logits of the first completion of a request, at one position."""
    keys = position_keys(torch.tensor([signed(sequence_seed(seed, 0))]), torch.tensor([position]))
    noise: list[float] = gumbel_noise(keys, torch.tensor([token_ids]))[0].tolist()
    return noise


def coupling() -> None:
    """Each place of a run, computed alone: what is sampled depends on the tokens before it, and on seed and position."""
    print("1. a run of four drafts")
    with LLM("demo", **OPTIONS) as llm:
        name = llm.tokenizer.decode
        tokens = llm.tokenizer.encode(PROMPT)
        drafts = NgramProposer().begin(tokens).propose(tokens, 4)
        print(
            f"   {len(tokens)} tokens end in {PROMPT.splitlines()[-1].strip()!r}; guessed: {[name([t]) for t in drafts]}"
        )
        for temperature in (0.0, 0.8):
            print(f"   temperature {temperature}: log probability{' / 0.8 + noise' if temperature else ''}")
            is_kept = True
            for place in range(len(drafts) + 1):
                params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=1, logprobs=20)
                [output] = llm.generate([tokens + drafts[:place]], params, use_tqdm=False)
                [sampled], logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
                assert logprobs is not None
                position = len(tokens) + place
                first, second = best_two(logprobs[0], temperature, position)
                assert first[1] == sampled
                text = f"{shown(first, name, temperature)}, {shown(second, name, temperature)}"
                draft = name([drafts[place]]) if place < len(drafts) else None
                print(f"     {position}: {text}: {verdict(draft, name([sampled]), is_kept)}")
                is_kept = is_kept and place < len(drafts) and drafts[place] == sampled


Candidate = tuple[float, int, float, float]
"""Log probability over temperature plus noise, token, log probability, noise."""


def best_two(logprobs: TokenLogprobs, temperature: float, position: int) -> list[Candidate]:
    tokens = list(logprobs)
    noise = noise_of(SEED, position, tokens) if temperature else [0.0] * len(tokens)
    own = [logprobs[token].logprob for token in tokens]
    scores = [logprob / (temperature or 1.0) + extra for logprob, extra in zip(own, noise, strict=True)]
    return sorted(zip(scores, tokens, own, noise, strict=True), reverse=True)[:2]


def shown(candidate: Candidate, name: Any, temperature: float) -> str:
    score, token, logprob, noise = candidate
    sum_of = f"{logprob:.2f} / {temperature} {'+' if noise >= 0 else '-'} {abs(noise):.2f} = " if temperature else ""
    return f"{name([token])!r} {sum_of}{score:.2f}"


def verdict(draft: str | None, sampled: str, is_kept: bool) -> str:
    if not is_kept:
        return "dropped: the draft before it is no token"
    if draft is None:
        return f"{sampled!r} is one more token"
    return (
        f"the draft {draft!r} is accepted" if draft == sampled else f"{draft!r} is rejected, {sampled!r} is the token"
    )


def two_models() -> None:
    """How often two distributions choose the same token by the same noise."""
    print("2. a draft model that finds other tokens likely")
    probabilities = [0.50, 0.30, 0.15, 0.05], [0.30, 0.50, 0.15, 0.05]
    target, draft = map(torch.tensor, probabilities)
    ratios = [torch.maximum(target / target[i], draft / draft[i]).sum().item() for i in range(4)]
    distance = (target - draft).abs().sum().item() / 2
    count = 100_000
    keys = position_keys(torch.full((count,), signed(sequence_seed(SEED, 0))), torch.arange(count))
    noise = gumbel_noise(keys, torch.arange(4)[None].expand(count, -1))
    same = ((target.log() + noise).argmax(1) == (draft.log() + noise).argmax(1)).float().mean().item()
    print(f"   large model {probabilities[0]}, draft model {probabilities[1]}: distance d = {distance:.2f}")
    print(f"   draws that have nothing in common agree in {(target * draft).sum().item():.3f} of all cases")
    print(f"   the same noise: {sum(1 / ratio for ratio in ratios):.3f}; in {count:,} positions: {same:.3f}")
    print(
        f"   at least (1 - d) / (1 + d) = {(1 - distance) / (1 + distance):.3f}; rejection: 1 - d = {1 - distance:.3f}"
    )


def life() -> None:
    """The first steps of a request, with guesses of at most four."""
    print("3. the life of runs: rejected drafts count until their step has ended")
    with LLM("demo", speculation="ngram", num_drafts=4, num_kv_blocks=64, **OPTIONS) as llm:
        engine = llm.engine
        request = engine.make_request(PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
        engine.submit(request)
        [seq] = request.sequences
        schedule = engine.scheduler.schedule

        def watched() -> Step | None:
            step = schedule()
            if step is not None:
                runs = step.plan.runs
                drafts = [[llm.tokenizer.decode([token]) for token in run.drafts] for run in runs if run.drafts]
                what = f"drafts {drafts[0]}" if drafts else "the prompt" if runs else "a decode"
                counts = f"tokens {seq.num_tokens}, known {len(seq.token_ids)}, computed {seq.num_computed}"
                print(f"   {what}: {counts}, blocks {len(seq.block_tables[0])}")
            return step

        engine.scheduler.schedule = watched  # type: ignore[method-assign]
        while engine.has_unfinished:
            engine.step()
            print(f"      then: tokens {seq.num_tokens}, computed {seq.num_computed}")


def texts() -> None:
    print("4. the same text in fewer steps")
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=96)
        expected: list[int] = []
        for proposer in (None, "ngram"):
            with LLM("demo", speculation=proposer, **OPTIONS) as llm:
                [output] = llm.generate(PROMPT, params, use_tqdm=False)
                own, metrics = output.outputs[0], llm.metrics
                steps = metrics.steps.num_decode_steps
                if proposer is None:
                    expected = own.token_ids
                    print(f"   temperature {temperature}: {len(own.token_ids)} tokens, {steps} decode steps")
                    print("      " + own.text[:240].replace("\n", "\n      "))
                    continue
                assert own.token_ids == expected
                stats = metrics.speculation
                assert stats is not None
                places = zip(stats.accepted_at[:6], stats.tried_at, strict=False)
                by_place = " ".join(f"{accepted}/{tried}" for accepted, tried in places)
                print(
                    f"   {proposer}: the same tokens, {steps} decode steps; {stats.num_accepted} of {stats.num_drafts} drafts "
                    f"accepted; of those at places 1 to 6, with all before them accepted: {by_place}"
                )


if __name__ == "__main__":
    coupling()
    two_models()
    life()
    texts()
