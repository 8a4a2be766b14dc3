"""KV groups: what layers that remember differently take of the pool, and what becomes of their block tables.

No model is loaded: the arithmetic is that of Gemma 3 270M, the tables are those of the scheduler, run without a model.
docs/kv-cache.md explains what is printed.
"""

from __future__ import annotations

from collections import Counter

from nanoengine import SamplingParams
from nanoengine.engine.kv.block_manager import BlockManager
from nanoengine.engine.kv.block_pool import Prefix
from nanoengine.engine.kv.groups import WINDOW, Groups, KVSpec, group_layers
from nanoengine.engine.messages import StepResult
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.sequence import Sequence

FULL = KVSpec()
MIB = 1 << 20


def memory_of_gemma() -> None:
    """18 layers, every sixth of which sees all; one head of 256 dimensions for K and one for V, in bfloat16."""
    print("1. Gemma 3 270M, blocks of 16 tokens, chunks of 512")
    specs = [FULL if layer % 6 == 5 else KVSpec(WINDOW, 512) for layer in range(18)]
    groups = group_layers(specs)
    kinds = Counter(str(group.spec) for group in groups)
    layers = len(groups[0].layers)
    block_bytes = layers * 16 * 2 * 256 * 2
    print(f"   {len(groups)} groups of {layers} layers: {dict(kinds)}; a block has {block_bytes >> 10} KiB in each")
    with_groups = Groups(tuple(group.spec for group in groups), 16, 512)
    all_full = Groups((FULL,) * len(groups), 16, 512)
    print("   tokens   blocks, MiB: at most in prefill    then in decode     all layers full")
    for count in (512, 4096, 32768):
        decoding = sum(-(-count // 16) - spec.first_seen(count - 1) // 16 for spec in with_groups.specs)
        numbers = (with_groups.blocks_at_once(count), decoding, all_full.blocks_at_once(count))
        cells = "".join(f"{blocks:>12} {blocks * block_bytes / MIB:6.1f}" for blocks in numbers)
        print(f"   {count:>6}   {'':>12}{cells}")


def tables_of_a_prompt() -> None:
    """One group sees all, one the last 40 tokens; steps have 32 tokens."""
    print("2. two groups, blocks of 16: one sees all, one the last 40 tokens; a prompt of 100 tokens in chunks of 32")
    specs = (FULL, KVSpec(WINDOW, 40))
    manager = BlockManager(60, 16, specs=specs, most_new_tokens=32)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=200)
    prompt = [i % 50 for i in range(100)]
    first = Sequence(0, prompt, SamplingParams(max_tokens=40))
    scheduler.add(first)
    while scheduler.has_unfinished:
        before = [list(table) for table in first.block_tables]
        plan = scheduler.schedule()
        if first.block_tables != before:
            full, window = (" ".join(f"{block:>2}" for block in table) for table in first.block_tables)
            print(f"   {first.num_computed_tokens:>3} tokens   full: {full}\n                window: {window}")
        scheduler.update(plan, StepResult([7] * plan.num_samples))
    forgotten = [group.num_forgotten_blocks for group in manager.stats.groups]
    print(f"   blocks given back on the way: {forgotten}; at the end all {manager.pool.num_free} are free")

    print("3. the same prompt again, when the window's first block was given to others")
    chain = manager.pool.parents_first()
    forget(manager, chain[0])
    second = Sequence(1, prompt, SamplingParams(max_tokens=1))
    scheduler.add(second)
    scheduler.schedule()
    hits = [group.num_hit_blocks for group in manager.stats.groups]
    print(f"   hit: {second.num_cached_tokens} tokens, by {hits} blocks; window: {second.block_tables[1]}")
    scheduler.finish(second, "abort")
    forget(manager, chain[4])
    third = Sequence(2, prompt, SamplingParams(max_tokens=1))
    scheduler.add(third)
    scheduler.schedule()
    print(
        f"   without the window's fifth block, too: {third.num_cached_tokens} tokens; window: {third.block_tables[1]}"
    )


def forget(manager: BlockManager, prefix: Prefix) -> None:
    """As if the blocks of the second group were evicted; those of the first stay."""
    kv = prefix.kv[1]
    for block in () if kv is None else kv.blocks:
        manager.pool.withdraw(block)


if __name__ == "__main__":
    memory_of_gemma()
    tables_of_a_prompt()
