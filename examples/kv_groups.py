"""KV groups: what layers that remember differently take of the pool, and what becomes of their block tables.

No model is loaded: the arithmetic is that of Gemma 3 270M, the tables are those of the scheduler, run without a model.
docs/kv-cache.md explains what is printed.
"""

from __future__ import annotations

from collections import Counter

from nanoengine import SamplingParams
from nanoengine.core.block_manager import BlockManager, FullLayout
from nanoengine.core.messages import StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence
from nanoengine.kv_groups.layouts import KVGroup, Need, WindowLayout, group_layers

CHUNK, MIB = 512, 1 << 20


def memory_of_gemma() -> None:
    """18 layers, every sixth of which sees all; one head of 256 dimensions for K and one for V, in bfloat16."""
    print("1. Gemma 3 270M, blocks of 16 tokens, chunks of 512")
    groups = group_layers([None if layer % 6 == 5 else 512 for layer in range(18)])
    kinds = Counter("all tokens" if group.window is None else f"a window of {group.window}" for group in groups)
    layers = len(groups[0].layers)
    block_bytes = layers * 16 * 2 * 256 * 2
    print(f"   {len(groups)} groups of {layers} layers: {dict(kinds)}; a block has {block_bytes >> 10} KiB in each")
    need, all_full = Need(groups, 16, CHUNK), Need([KVGroup(None, group.layers) for group in groups], 16, CHUNK)
    print("   tokens   blocks, MiB: at most in prefill    then in decode     all layers full")
    for count in (512, 4096, 32768):
        decoding = sum(-(-count // 16) - group.layout(CHUNK).first_seen(count - 1) // 16 for group in groups)
        numbers = (need.num_blocks(count), decoding, all_full.num_blocks(count))
        cells = "".join(f"{blocks:>12} {blocks * block_bytes / MIB:6.1f}" for blocks in numbers)
        print(f"   {count:>6}   {'':>12}{cells}")


def tables_of_a_prompt() -> None:
    """One group sees all, one the last 40 tokens; steps have 32 tokens."""
    print("2. two groups, blocks of 16: one sees all, one the last 40 tokens; a prompt of 100 tokens in chunks of 32")
    blocks = BlockManager(60, 16, [FullLayout(), WindowLayout(40, 32)])
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=32)
    first = add(scheduler, max_tokens=40)
    shown: list[list[int]] = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        if first.block_tables != shown:
            shown = [table.copy() for table in first.block_tables]
            full, window = (" ".join(f"{block:>2}" for block in table) for table in shown)
            print(f"   {first.num_computed:>3} tokens   full: {full}\n                window: {window}")
        scheduler.commit(StepResult([7] * step.plan.num_samples))
    print(f"   at the end all {blocks.num_free} are free")

    print("3. the same prompt again, when the window's first block was given to others")
    evict(blocks, first, 0)
    second = add(scheduler, max_tokens=1)
    scheduler.schedule()
    print(f"   hit: {second.num_cached_tokens} tokens; tables: {second.block_tables}")
    scheduler.finish(second, "abort")
    evict(blocks, first, 4)
    third = add(scheduler, max_tokens=1)
    scheduler.schedule()
    print(f"   without the window's fifth block, too: {third.num_cached_tokens} tokens; tables: {third.block_tables}")


def add(scheduler: Scheduler, max_tokens: int) -> Sequence:
    request = Request("", None, [i % 50 for i in range(100)], SamplingParams(max_tokens=max_tokens))
    request.sequences = [seq] = [Sequence(scheduler.num_steps, request)]
    scheduler.add(seq)
    return seq


def evict(blocks: BlockManager, seq: Sequence, place: int) -> None:
    """As if one block of the second group went to others; that of the first stays."""
    hash, _ = seq.block_hashes[place]
    blocks.contents[blocks.index[1].pop(hash)] = None


if __name__ == "__main__":
    memory_of_gemma()
    tables_of_a_prompt()
