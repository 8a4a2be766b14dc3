"""States: where snapshots of a hybrid's states are taken, and where its sequences begin.

No model is loaded: the arithmetic is that of Qwen3.5's shapes, the orders are those of the scheduler, run without a model.
docs/hybrids.md explains what is printed.
"""

from __future__ import annotations

import math

from nanoengine import SamplingParams
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.seams import KVStore, PolicyPart
from nanoengine.core.sequence import Request, Sequence
from nanoengine.kv_groups.messages import ORDERS, StateOrders
from nanoengine.kv_groups.snapshots import Snapshots
from nanoengine.models.model_config import StateConfig

MIB = 1 << 20


def memory() -> None:
    print("1. states of a sequence, float32, and the K/V that take as much, bfloat16")
    shapes = {
        "LFM2-1.2B": (StateConfig(taps=3, channels=2048), 10, 6 * 2 * 8 * 64 * 2),
        "Qwen3.5-0.8B": (delta(16), 18, 6 * 2 * 2 * 256 * 2),
        "Qwen3.5-9B": (delta(32), 24, 8 * 2 * 4 * 256 * 2),
    }
    for name, (states, num_layers, kv_bytes) in shapes.items():
        size = 4 * num_layers * sum(map(math.prod, states.shapes))
        print(f"   {name:<13} {num_layers} layers: {size / MIB:6.2f} MiB = K/V of {size / kv_bytes:5.0f} tokens")


def delta(num_heads: int) -> StateConfig:
    channels = 2 * 16 * 128 + num_heads * 128
    return StateConfig(taps=4, channels=channels, num_heads=num_heads, num_groups=16, depth=128, width=128)


def orders_of_three_prompts() -> None:
    print("2. three prompts that share 100 tokens, blocks of 16, steps of 80")
    stores: list[KVStore] = []
    blocks = BlockManager(100, 16, stores=stores)
    snapshots = Snapshots(blocks, num_slots=20)
    stores.append(snapshots)
    parts: list[PolicyPart] = [snapshots]
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=80, parts=parts)
    shared = list(range(100))
    for number in range(3):
        prompt = shared + [1000 * (number + 1) + i for i in range(50)]
        run(scheduler, snapshots, prompt, f"prompt {number + 1}", max_tokens=30 if number == 2 else 1)
    text = prompt + [7] * 30
    run(scheduler, snapshots, [*text, 8, 9], "the next turn", max_tokens=1)


def run(scheduler: Scheduler, snapshots: Snapshots, prompt: list[int], name: str, max_tokens: int) -> None:
    request = Request("", None, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    seq = Sequence(scheduler.num_steps, request)
    request.sequences.append(seq)
    scheduler.add(seq)
    hashes: dict[bytes, int] = {}
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        orders: StateOrders = step.plan.extras.get(ORDERS) or StateOrders()
        result = StepResult([7] * step.plan.num_samples)
        if step.started:
            print(f"   {name}: {len(prompt)} tokens, {seq.num_cached_tokens} of them cached")
        for restore in orders.restores:
            print(f"      restore row {restore.row} from slot {restore.slot}")
        for order in orders.snapshots:
            print(f"      snapshot of row {order.row} behind token {order.position} into slot {order.slot}")
        seqs = scheduler.commit(result)
        for part in scheduler.parts:
            part.after_step(step, result, seqs)
        hashes |= {hash: (i + 1) * 16 for i, (hash, _) in enumerate(seq.block_hashes)}
    for part in scheduler.parts:
        part.finished(seq)
    kept = {own.slot: hashes[hash] for hash, own in snapshots.index.items() if hash in hashes}
    print(
        f"      kept of its tokens: {', '.join(f'{kept[slot]} in slot {slot}' for slot in sorted(kept, key=kept.__getitem__))}"
    )


if __name__ == "__main__":
    memory()
    orders_of_three_prompts()
