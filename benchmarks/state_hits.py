"""Hit rates of a model with states: how much of prompts is found, where K/V are cached for every token and states for some.

    python -m benchmarks.state_hits

The scheduler, the block manager and the snapshots as in an engine, without a model: what is cached does not depend on numbers.
Sixteen clients ask, each as soon as it has its answer, in a pool of 65,536 tokens. `chats` have one of four system prompts; in
one turn of eight the user goes back to an earlier turn and asks something else. `agents` have one of eight sets of tools; one
step of ten asks three times from there on, at once. Shares are of all prompt tokens: K/V alone is what a model without states
would find.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence

from benchmarks.options import positive_int
from benchmarks.report import align
from benchmarks.scheduler import sample
from nanoengine import SamplingParams
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Request
from nanoengine.core.sequence import Sequence as Seq
from nanoengine.kv_groups.snapshots import Snapshots

BLOCK, NUM_BLOCKS, BUDGET, NUM_CLIENTS = 16, 4096, 512, 16
SLOTS = (16, 53, 256)
"""Of snapshots; 53 are 1 GiB of Qwen3.5-0.8B's."""

Task = Generator[list[tuple[list[int], int]], list[list[int]], None]
"""What a client asks at once, prompts and lengths of answers, time after time; it is sent the answers."""


class WithoutBranches(Snapshots):
    """None where prompts part."""

    def _cached(self, seq: Seq) -> int:
        return 0

    def _common(self, seq: Seq, other: Seq) -> int:
        return 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("state_hits", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=positive_int, default=1500, help="of each trace (default: 1500)")
    args = parser.parse_args(arguments)
    rows = [["trace", "slots", "K/V alone", "snapshots", "none where prompts part", "taken", "taken without"]]
    for name, trace in TRACES.items():
        alone, _ = hit_rate(trace, args.requests, None, 0)
        for slots in SLOTS:
            (found, taken), (less, fewer) = (
                hit_rate(trace, args.requests, kind, slots) for kind in (Snapshots, WithoutBranches)
            )
            rows.append([name, str(slots), f"{alone:.1%}", f"{found:.1%}", f"{less:.1%}", str(taken), str(fewer)])
    print(*align(rows), sep="\n")


def hit_rate(
    trace: Callable[[random.Random], Task], num_requests: int, kind: type[Snapshots] | None, slots: int
) -> tuple[float, int]:
    """Share of prompt tokens that were found, and snapshots taken."""
    rng, stores, parts = random.Random(1), list[KVStore](), list[PolicyPart]()
    blocks = BlockManager(NUM_BLOCKS, BLOCK, stores=stores)
    snapshots = None if kind is None else kind(blocks, slots)
    if snapshots is not None:
        stores.append(snapshots)
        parts.append(snapshots)
    scheduler = Scheduler(
        blocks, max_num_seqs=3 * NUM_CLIENTS, max_num_batched_tokens=BUDGET, policy="decode_first", parts=parts
    )
    tasks: deque[Task] = deque()
    clients: dict[int, tuple[Task, list[Seq]]] = {}  # who waits for which answers
    num_asked = num_prompt = num_cached = 0

    def ask(client: int, task: Task, prompts: list[tuple[list[int], int]]) -> None:
        nonlocal num_asked
        seqs = []
        for prompt, count in prompts:
            request = Request(str(num_asked), None, prompt, SamplingParams(ignore_eos=True, max_tokens=count))
            request.sequences = [Seq(num_asked, request)]
            num_asked += 1
            seqs += request.sequences
            scheduler.add(request.sequences[0])
            for part in parts:
                part.submitted(request)
        clients[client] = task, seqs

    for client in range(NUM_CLIENTS):
        tasks.append(trace(random.Random(rng.random())))
        ask(client, tasks[-1], next(tasks[-1]))
    while scheduler.has_unfinished:
        scheduler.schedule()
        step = scheduler.in_flight[0]
        result = sample(step.number, step.plan)
        seqs = scheduler.commit(result)
        for part in parts:
            part.after_step(step, result, seqs)
        for seq in seqs:
            if seq.finished:
                seq.request.num_finished += 1
                num_prompt += len(seq.request.prompt_token_ids)
                num_cached += seq.num_cached_tokens or 0
                for part in parts:
                    part.finished(seq)
        for client, (task, waiting) in list(clients.items()):
            if all(seq.finished for seq in waiting) and num_asked < num_requests:
                try:
                    ask(client, task, task.send([seq.token_ids for seq in waiting]))
                except StopIteration:
                    new = trace(random.Random(rng.random()))
                    ask(client, new, next(new))
    return num_cached / num_prompt, 0 if snapshots is None else snapshots.num_taken


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10_000) for _ in range(count)]


def chats(rng: random.Random) -> Task:
    """Eight turns on average of 20 to 200 tokens, answers of 50 to 250."""
    which = rng.randrange(4)
    said = [some(random.Random(which), (610, 875, 1040, 1275)[which])]
    while True:
        if len(said) > 2 and rng.random() < 1 / 8:
            del said[rng.randrange(1, len(said)) :]
        prompt = said[-1] + some(rng, rng.randint(20, 200))
        [answer] = yield [(prompt, rng.randint(50, 250))]
        said.append(answer)
        if rng.random() < 1 / 8 or len(answer) > 6000:
            return


def agents(rng: random.Random) -> Task:
    """Twelve steps on average: each adds 100 to 700 tokens, what a tool has returned, and answers in 30 to 120."""
    which = rng.randrange(8)
    said = some(random.Random(100 + which), 2500 + 133 * which)
    while True:
        prompts = [said + some(rng, rng.randint(100, 700)) for _ in range(3 if rng.random() < 0.1 else 1)]
        answers = yield [(prompt, rng.randint(30, 120)) for prompt in prompts]
        said = answers[0]
        if rng.random() < 1 / 12 or len(said) > 12_000:
            return


TRACES: dict[str, Callable[[random.Random], Task]] = {"chats": chats, "agents": agents}

if __name__ == "__main__":
    main()
