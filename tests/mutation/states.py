"""Mutants of states: snapshots, accepted drafts, recordings."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

SNAPSHOTS = "nanoengine/features/kv_groups/snapshots.py"
POOL = "nanoengine/features/kv_groups/state_pool.py"
TEST_SNAPSHOTS = "tests/features/kv_groups/test_snapshots.py"
TEST_STATES = "tests/features/kv_groups/test_state_pool.py"
TEST_BELOW = "tests/features/kv_offload/test_states.py"
TEST_TIERS = "tests/features/kv_offload/test_tiers_every_way.py"
KERNELS = "nanoengine/kernels/triton/"
TEST_TRITON = "tests/kernels/triton/test_recurrences.py"
TEST_GPU = "tests/features/kv_groups/test_states_as_on_a_gpu.py"

MUTANTS = (
    Mutant(
        "a-prefix-ends-without-a-snapshot",
        SNAPSHOTS,
        "return bool(self.groups) and all(has(group, hash, tokens) for group in self.groups)",
        "return True",
        "A sequence starts behind a cached prefix although there is no state of it.",
        (TEST_SNAPSHOTS,),
    ),
    Mutant(
        "no-snapshot-where-prompts-part",
        SNAPSHOTS,
        "{last, whole, self._branches.get(seq, 0), *others}",
        "{last, whole, *others}",
        "Where K/V were cached and no state was, none is kept, so the next prompt does not find one either.",
        (TEST_SNAPSHOTS,),
    ),
    Mutant(
        "prompts-that-wait-are-not-looked-at",
        SNAPSHOTS,
        "self._branches.get(seq, 0), *others}",
        "self._branches.get(seq, 0)}",
        "Of prompts that arrive together, the second finds no state where it parts from the first.",
        (TEST_SNAPSHOTS,),
    ),
    Mutant(
        "passing-snapshots-stay",
        SNAPSHOTS,
        "self._forget(before.hash)",
        "pass",
        "Every block of an answer leaves a snapshot, and prompts lose theirs.",
        (TEST_SNAPSHOTS,),
    ),
    Mutant(
        "snapshots-of-failed-steps-count",
        SNAPSHOTS,
        "own is step and not step.is_dropped and not isinstance(result, BaseException)",
        "own is step",
        "A snapshot that a failed step has not taken is found.",
        (TEST_SNAPSHOTS,),
    ),
    Mutant(
        "slots-of-lost-snapshots-are-lost",
        SNAPSHOTS,
        "                    self.free.append(slot)\n                    continue",
        "                    continue",
        "The slot of a snapshot that nobody needs is never used again.",
        (TEST_SNAPSHOTS,),
    ),
    Mutant(
        "rejected-drafts-stay-in-the-state",
        POOL,
        "runs.append((row, start, end - start, False))\n            places += range(first, first + end - start)",
        "runs.append((row, start, end - start + 1, False))\n            places += range(first, first + end - start + 1)",
        "A draft that was rejected is applied to the state, too.",
        (TEST_STATES,),
    ),
    Mutant(
        "states-go-on-with-drafts",
        POOL,
        "            if not is_drafted:\n                tokens.append(first - 1)",
        "            if True:\n                tokens.append(first - 1)",
        "A run with drafts leaves its state behind the last of them.",
        (TEST_STATES,),
    ),
    Mutant(
        "states-begin-with-what-was-there",
        POOL,
        "self.pool.slots[started.row].zero_()",
        "pass",
        "A sequence begins with the state that its row had before.",
        (TEST_STATES,),
    ),
    Mutant(
        "some-pieces-are-a-snapshot",
        SNAPSHOTS,
        "and all(has(group",
        "and any(has(group",
        "A prefix ends where host memory or files have some pieces of its states.",
        (TEST_TIERS,),
    ),
    Mutant(
        "evicted-snapshots-are-lost",
        SNAPSHOTS,
        "self.below.evicted(group, oldest.hash, oldest.tokens, piece)",
        "pass",
        "Snapshots that the pool has no room for go nowhere.",
        (TEST_BELOW,),
    ),
    Mutant(
        "snapshots-of-answers-are-not-written",
        SNAPSHOTS,
        "                if why is Why.PROMPT or seq.finished:\n                    self._keep_last(seq)\n",
        "",
        "What a prompt leaves is not known to whoever writes files as the engine is closed.",
        (TEST_BELOW,),
    ),
    Mutant(
        "wrong-states-stay-below",
        SNAPSHOTS,
        "self.below.invalidated(own, hash, tokens)",
        "pass",
        "States that may be wrong are found in host memory and files.",
        ("tests/features/kv_offload/test_offload.py",),
    ),
    Mutant(
        "loaded-states-are-zeroed",
        SNAPSHOTS,
        "orders.restores.append(Restore(seq.row, seq.row))",
        "pass",
        "The states that were loaded into a row are overwritten with zeros.",
        (TEST_BELOW,),
    ),
    Mutant(
        "states-are-loaded-behind-the-rows",
        "nanoengine/features/kv_offload/capability.py",
        "parts.insert(parts.index(keeper), ",
        "parts.append(",
        "Snapshots are copied to host memory after others took their slots.",
        (TEST_BELOW,),
    ),
    Mutant(
        "states-are-pushed-out-before-they-are-loaded",
        "nanoengine/features/kv_offload/offload.py",
        "        wanted += [(group, blocks[-1]) for group in self.state_groups]\n",
        "",
        "Host memory gives away states that a sequence is about to start from.",
        (TEST_TIERS,),
    ),
    Mutant(
        "files-of-states-are-not-read",
        "nanoengine/features/kv_offload/file_gate.py",
        "        seen += [(group, hashes[-1:]) for group in self.offload.state_groups]\n",
        "",
        "Files of K/V are read, and those of the states behind them are not.",
        (TEST_BELOW,),
    ),
    Mutant(
        "a-bad-file-of-a-state-loses-all",
        "nanoengine/features/kv_offload/file_gate.py",
        "        if any(name not in self.disk.staged for name in fetch.names):",
        "        if False:",
        "Where the last state of a prefix is damaged, the state before it is not read.",
        (TEST_BELOW,),
    ),
    Mutant(
        "states-are-not-counted-beside-the-pool",
        "nanoengine/features/kv_groups/capability.py",
        "startup.later_bytes += (startup.num_rows + 1 + self._most_snapshots)",
        "startup.later_bytes += (1 + self._most_snapshots)",
        "The K/V pool takes the memory that running states need later.",
        (TEST_GPU,),
    ),
    Mutant(
        "convolution-remembers-one-token-less",
        KERNELS + "short_conv.py",
        "at = token + (window - (TAPS - 2))",
        "at = token + (window - (TAPS - 1))",
        "The state of a convolution is that of the token before.",
        (TEST_TRITON,),
    ),
    Mutant(
        "small-steps-of-mamba-are-rounded-away",
        KERNELS + "recurrence.py",
        "tl.log(total) * (grown / (total - 1.0))",
        "tl.log(total)",
        "softplus of a number far below 0 has few right digits.",
        (TEST_TRITON,),
    ),
    Mutant(
        "decodes-are-compiled-as-they-are-aligned",
        KERNELS + "states.py",
        '*("query", "key", "value", "fading",',
        '*("key", "value", "fading",',
        "A layer has several compiled kernels, which may round differently.",
        (TEST_TRITON,),
    ),
)
