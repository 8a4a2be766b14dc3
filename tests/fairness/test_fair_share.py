"""Shares of clients: nobody waits for all that another sent, a client that is alone has everything, and tokens are the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.llm_engine import LLMEngine
from nanoengine.core.sampling_params import SamplingParams
from nanoengine.core.scheduler import Step
from nanoengine.core.seams import PolicyPart
from nanoengine.core.sequence import Request
from nanoengine.fairness.block_share import BlockShare
from nanoengine.fairness.fair_share import Clients, FairShare
from tests.core.toys import VOCAB, ToyModel, check, make_engine, run

POLICIES = ["prefill_first", "mixed"]


def shared_engine(
    share: float = 0.5,
    *,
    max_num_seqs: int = 100,
    parts: Seq[PolicyPart] = (),
    kind: type[FairShare] = FairShare,
    num_blocks: int = 400,
    enable_prefix_caching: bool = False,
    **options: Any,
) -> tuple[LLMEngine, Any]:
    """Equal prompts do not wait for each other: only completions of one request share blocks."""
    clients: Counter[str] = Counter()
    shares, blocks = kind(share, max_num_seqs, clients), BlockManager(num_blocks, 4)
    blocks.enable_prefix_caching = enable_prefix_caching
    plugged = list(parts)
    plugged.append(Clients(clients, [BlockShare(blocks, clients), shares], plugged))
    engine = make_engine(parts=plugged, max_num_seqs=max_num_seqs, blocks=blocks, **options)
    return engine, shares


def submit(engine: LLMEngine, length: int, client: str, max_tokens: int = 3, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=options.pop("n", 1), ignore_eos=True, seed=0)
    prompt = [(length * 7 + i * i + len(client)) % VOCAB for i in range(length)]
    request = engine.make_request(prompt, params, client=client, **options)
    engine.submit(request)
    return request


def tokens_of_clients(step: Step) -> Counter[str]:
    """Prompt tokens of each client in a step."""
    taken: Counter[str] = Counter()
    for seq, one in zip(step.runs, step.plan.runs, strict=True):
        taken[seq.request.client] += one.num_new
    return taken


def rows_of_clients(engine: LLMEngine) -> Counter[str]:
    return Counter(seq.request.client for seq in engine.scheduler.running)


class Recorder(PolicyPart):
    """Keeps the steps that were made."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def complete(self, step: Step) -> None:
        self.steps.append(step)


# ---- prompt tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("as_one", [True, False], ids=["one prompt", "many prompts"])
def test_nobody_waits_for_all_that_another_has_sent(policy: str, as_one: bool) -> None:
    """One client has 6,000 tokens to be computed; ten others come meanwhile."""
    recorder = Recorder()
    limits = {"num_blocks": 6000, "max_model_len": 6100, "max_num_batched_tokens": 100, "max_num_seqs": 400}
    engine, _ = shared_engine(**limits, policy=policy, parts=[recorder])
    greedy = [submit(engine, length, "greedy", 2) for length in ([6000] if as_one else range(20, 100))]
    others: dict[Request, int] = {}  # the step in which each came
    num_steps = 0
    while not all(request.sequences[0].output_token_ids for request in greedy):
        if num_steps % 5 == 4 and len(others) < 10:
            others[submit(engine, 6, f"{len(others)}", 20)] = num_steps
        engine.step()
        check(engine.scheduler)
        num_steps += 1
        for request, came in others.items():
            assert request.sequences[0].output_token_ids or num_steps - came < 2, "two steps are enough for anybody"
        if policy == "mixed":
            assert tokens_of_clients(recorder.steps[-1])["greedy"], "the large client moves all the same"
    assert len(others) == 10


def test_shares_end_where_no_other_client_has_a_prompt_to_compute() -> None:
    """A client whose sequences only decode leaves the whole step to the others."""
    recorder = Recorder()
    engine, _ = shared_engine(max_num_batched_tokens=64, num_blocks=1000, policy="mixed", parts=[recorder])
    decoding = submit(engine, 3, "decoding", 50)
    engine.step()
    for length in (50, 51, 52):
        submit(engine, length, "reading", 9)
    for _ in range(3):
        engine.step()
    seen = [tokens_of_clients(step)["reading"] for step in recorder.steps[1:]]
    assert seen == [63, 62, 50 + 51 + 52 - 63 - 62]
    assert not decoding.finished


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_that_had_its_share_of_a_step_is_passed_over(policy: str) -> None:
    engine, _ = shared_engine(max_num_batched_tokens=20, policy=policy)
    for length, client in ((7, "a"), (8, "a"), (4, "a"), (6, "b"), (9, "b"), (2, "c")):
        submit(engine, length, client)
    step = engine.scheduler.schedule()
    assert [(run.start, run.num_new) for run in step.plan.runs] == [(0, 7), (0, 3), (0, 6), (0, 4)]
    assert [seq.seq_id for seq in step.runs] == [0, 1, 3, 4]
    step = engine.scheduler.schedule()
    assert [seq.seq_id for seq in step.runs] == [1, 4, 2, 5], "those that were begun first, then by age"


def test_a_client_that_is_alone_has_every_step_and_pays_nothing() -> None:
    """What shares out the steps is asked only while there are two."""
    engine, shares = shared_engine()
    parts, mine = engine.scheduler.parts, [submit(engine, 5, "a", 2, n=2)]
    assert shares not in parts
    others = [submit(engine, 5, client, 9) for client in ("b", "c")]
    assert (shares in parts, shares.num_unfinished) == (True, {"a": 2, "b": 1, "c": 1})
    engine.abort(others[0].request_id)
    assert (shares in parts, shares.num_unfinished) == (True, {"a": 2, "c": 1})
    engine.abort(others[1].request_id)
    assert (shares in parts, shares.num_unfinished) == (False, {"a": 2})
    run(engine, [])
    assert (shares in parts, shares.num_unfinished, mine[0].finished) == (False, {}, True)


# ---- rows


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("priority", [0, -(2**63)])
def test_two_requests_that_took_every_row_give_a_newcomer_its_part(policy: str, depth: int, priority: int) -> None:
    engine, _ = shared_engine(num_blocks=900, max_num_seqs=32, policy=policy, depth=depth)
    flood = [submit(engine, 5, "flood", 50, n=16, priority=priority) for _ in range(2)]
    for _ in range(3):
        engine.step()
    assert rows_of_clients(engine) == {"flood": 32}
    newcomer = submit(engine, 9, "newcomer", 30, n=20)
    for _ in range(2 * depth + 2):
        engine.step()
        check(engine.scheduler)
    assert rows_of_clients(engine) == {"flood": 16, "newcomer": 16}, "equal parts"
    assert sum(bool(seq.output_token_ids) for seq in newcomer.sequences) == 16
    run(engine, [])
    lengths = [len(seq.output_token_ids) for request in (*flood, newcomer) for seq in request.sequences]
    assert lengths == [50] * 32 + [30] * 20


def test_a_row_that_becomes_free_is_kept_for_the_client_that_lacks_it() -> None:
    """Not for the client with most rows, though its sequences came before."""
    engine, _ = shared_engine(max_num_seqs=4, num_blocks=200)
    for max_tokens in (2, 40, 40, 40, 40, 40):
        submit(engine, 5, "early", max_tokens)
    submit(engine, 6, "late", 40)
    engine.step()
    assert rows_of_clients(engine) == {"early": 3, "late": 1}
    engine.step()
    engine.step()
    assert rows_of_clients(engine) == {"early": 3, "late": 1}


def test_a_client_keeps_the_rows_of_its_part() -> None:
    """However many others come: where all have their parts, the order alone decides."""
    engine, _ = shared_engine(max_num_seqs=4, num_blocks=200)
    first = [submit(engine, 5, "first", 40) for _ in range(4)]
    engine.step()
    for i in range(12):
        submit(engine, 6, f"{i}", 40)
        engine.step()
        engine.step()
        assert rows_of_clients(engine)["first"] >= 1
    assert max(rows_of_clients(engine).values()) == 1
    assert sum(request.sequences[0].num_preemptions for request in first) == 3
    run(engine, [])


# ---- costs


def test_waiting_sequences_are_looked_at_once_a_step_and_only_while_one_may_start() -> None:
    class Counted(FairShare):
        num_looks = 0

        def candidates(self, waiting: Any) -> Any:
            yield from super().candidates(self.counted(waiting))

        def counted(self, waiting: Any) -> Any:
            for seq in waiting:
                self.num_looks += 1
                yield seq

    engine, shares = shared_engine(kind=Counted, max_num_seqs=64, num_blocks=4000, policy="mixed")
    for _ in range(2000):
        submit(engine, 5, "crowd", 40)
    for _ in range(32):
        submit(engine, 6, "late", 40)
    engine.step()
    assert rows_of_clients(engine) == {"crowd": 32, "late": 32}
    assert shares.num_looks <= 2033, "one pass for 64 admissions"
    shares.num_looks = 0
    for _ in range(10):
        engine.step()
    assert shares.num_looks <= 10, "no row is free"


# ---- all together


@pytest.mark.parametrize("seed", range(20))
def test_shares_hold_in_every_step_and_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    share = rng.choice([0.001, 0.3, 0.5, 0.9])
    budget = rng.choice([3, 16, 40])
    options: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice([2, 3, 8]),
        "num_blocks": rng.choice([16, 40]),
        "enable_prefix_caching": rng.random() < 0.5,
        "policy": rng.choice(POLICIES),
        "max_chunk": rng.choice([None, 1, 7]),
        "depth": rng.choice([1, 2]),
    }
    wishes = [
        (rng.randint(1, 30), rng.choice("aabc"), rng.randint(1, 12), rng.choice([1, 1, 3]), rng.choice([0, 0, -1, 1]))
        for _ in range(12)
    ]
    arrivals = [rng.randint(0, 12) for _ in wishes]
    victim = rng.randrange(24)

    recorder = Recorder()

    def serve(engine: LLMEngine, gate: FairShare | None) -> list[Request]:
        requests: list[Request] = []
        for now in range(5000):
            for (length, client, max_tokens, n, priority), came in zip(wishes, arrivals, strict=True):
                if came == now:
                    requests.append(submit(engine, length, client, max_tokens, n=n, priority=priority))
            if now > 12 and not engine.has_unfinished:
                return requests
            engine.step()
            check(engine.scheduler)
            while recorder.steps:
                step = recorder.steps.pop()
                taken = tokens_of_clients(step)
                if gate is not None and len(taken) > 1:
                    assert max(taken.values()) <= max(1, share * (budget - len(step.decodes)))
            if gate is not None and victim == now and engine.requests:
                engine.abort(next(iter(engine.requests)))
        raise AssertionError("the engine does not come to an end")

    def tokens(requests: list[Request]) -> list[tuple[str, list[list[int]]]]:
        return sorted((r.client, [seq.output_token_ids for seq in r.sequences]) for r in requests if not aborted(r))

    def aborted(request: Request) -> bool:
        return any(seq.finish_reason == "abort" for seq in request.sequences)

    alone = serve(make_engine(num_blocks=900, model=ToyModel(4)), None)
    engine, shares = shared_engine(share, **options, parts=[recorder])
    together = serve(engine, shares)
    assert not shares.num_unfinished
    expected = Counter((client, str(found)) for client, found in tokens(alone))
    assert Counter((client, str(found)) for client, found in tokens(together)) <= expected
    assert sum(map(aborted, together)) <= 1
