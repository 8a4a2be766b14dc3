"""Mutants of the model runner: a plan to tensors, rows, recordings, sizes."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

INPUTS = "nanoengine/core/inputs.py"
RUNNER = "nanoengine/core/model_runner.py"
BUCKETS = "nanoengine/kernels/recording/buckets.py"
CACHE = "nanoengine/core/kv_cache.py"
TEST_LLM = "tests/core/test_llm.py"
TEST_INPUTS = "tests/core/test_inputs.py"
TEST_CACHE = "tests/core/test_kv_cache.py"
TEST_BUCKETS = "tests/kernels/recording/test_buckets.py"
TEST_RECORDED = "tests/kernels/recording/test_recorded_steps.py"

MUTANTS = (
    Mutant(
        "decode-samples-at-the-position-before",
        INPUTS,
        "positions[:count] = plan.decode_starts + 1",
        "positions[:count] = plan.decode_starts",
        "A decoded token is drawn with the noise of the position before its own.",
        (TEST_INPUTS, TEST_LLM),
    ),
    Mutant(
        "chunk-samples-from-the-wrong-token",
        INPUTS,
        "np.arange(end - num_samples, end), run.row",
        "np.arange(end - 1 - num_samples, end - 1), run.row",
        "A prompt samples from its last token but one.",
        (TEST_INPUTS,),
    ),
    Mutant(
        "padding-runs-in-a-real-row",
        BUCKETS,
        "row[:] = sampled_rows[:] = rows.padding_row",
        "row[:] = sampled_rows[:] = 0",
        "The padding of a recorded step writes to the K/V and the last token of a running sequence.",
        (TEST_BUCKETS,),
    ),
    Mutant(
        "block-table-lacks-the-last-block",
        INPUTS,
        "num_blocks = -(-max(packed.seq_lens) // block_size)",
        "num_blocks = max(packed.seq_lens) // block_size or 1",
        "The last block of the longest sequence is missing from the block tables of a step.",
        (TEST_INPUTS, TEST_LLM),
    ),
    Mutant(
        "draft-positions-stand-still",
        INPUTS,
        "run.start + run.num_new + 1 - num_samples + np.arange(num_samples)",
        "run.start + run.num_new + 1 - num_samples",
        "All samples of a run with drafts are drawn with the noise of its first position.",
        (TEST_INPUTS, "tests/features/speculation/test_engine.py"),
    ),
    Mutant(
        "groups-share-one-block-table",
        INPUTS,
        "metadata = [of_groups[group] for group in kv_cache.groups]",
        "metadata = [of_groups[0] for group in kv_cache.groups]",
        "Layers with a window use the block table of those without.",
        (TEST_INPUTS,),
    ),
    Mutant(
        "table-entry-stays-stale",
        INPUTS,
        "at = (group * num_rows + row) * width + first",
        "at = (group * num_rows + row) * width",
        "A changed entry of a block table is written to the start of the table.",
        (TEST_INPUTS, TEST_LLM),
    ),
    Mutant(
        "row-keeps-the-last-token-of-another",
        INPUTS,
        "        self.last_tokens.index_copy_(0, targets, last)\n",
        "",
        "A row that begins anew goes on from the last token of the sequence before.",
        (TEST_INPUTS,),
    ),
    Mutant(
        "broken-rows-are-run",
        RUNNER,
        "            self._failed_epoch = plan.epoch\n",
        "            pass\n",
        "After a failed step, the next plan in flight computes its rows although nobody knows what they hold.",
        ("tests/core/test_model_runner.py",),
    ),
    Mutant(
        "blocks-are-not-cleared",
        CACHE,
        "                tensor[blocks] = 0\n",
        "                pass\n",
        "Blocks that may hold NaN are not overwritten.",
        ("tests/core/test_model_runner.py",),
    ),
    Mutant(
        "blocks-are-cleared-too-late",
        RUNNER,
        "                return self._compute(plan) if plan.num_tokens else []\n",
        "                found = self._compute(plan) if plan.num_tokens else []\n"
        "                self.kv_cache.zero(plan.zeroed)\n"
        "                return found\n",
        "Blocks are overwritten behind the step that has written to them.",
        ("tests/core/test_model_runner.py",),
    ),
    Mutant(
        "prompt-logprobs-are-shifted",
        "nanoengine/features/sampling/runner_part.py",
        "firsts = len(plan.decode_rows) + np.cumsum([0, *counts[:-1]])",
        "firsts = np.cumsum([0, *counts[:-1]])",
        "Beside decodes, log probabilities of a prompt come from hidden states of others.",
        ("tests/features/sampling/test_in_an_engine.py",),
    ),
    Mutant(
        "exact-bucket-is-passed-over",
        BUCKETS,
        "self.num_runs >= size.num_runs and",
        "self.num_runs > size.num_runs and",
        "A batch that a recording fits exactly runs in the next larger one.",
        (TEST_BUCKETS,),
    ),
    Mutant(
        "bucket-with-too-few-tokens-is-chosen",
        BUCKETS,
        "and self.num_tokens >= size.num_tokens",
        "and self.num_runs * self.num_tokens >= size.num_tokens",
        "A step with drafts is replayed in a recording whose runs are too short.",
        (TEST_BUCKETS,),
    ),
    Mutant(
        "cpu-steps-with-drafts-are-not-recorded",
        "nanoengine/kernels/recording/capability.py",
        "for tokens in range(2, most + 1)",
        "for tokens in range(2, 2)",
        "A step with drafts is never replayed on a CPU.",
        (TEST_RECORDED,),
    ),
    Mutant(
        "rows-are-looked-up-without-gaps",
        "nanoengine/kernels/recording/cpu_recorder.py",
        "tables.stride(1) * size",
        "tables[0, 0].nbytes",
        "A recorded step takes its block tables from a table that is wider than they are as if it were not.",
        ("tests/kernels/recording/test_cpu_recorder.py",),
    ),
    Mutant(
        "step-that-is-read-inside-is-replayed",
        RUNNER,
        "None if self.recorder is None or plan.needs_hidden else",
        "None if self.recorder is None else",
        "A step whose hidden states a part of the runner reads is replayed without them.",
        ("tests/core/test_model_runner.py",),
    ),
    Mutant(
        "answered-calls-are-recorded",
        "nanoengine/kernels/recording/cpu_recorder.py",
        "elif not made and name not in TELLS_SHAPE:",
        "elif False:",
        "A step that reads a number from a tensor is recorded, and replayed with the number of the first time.",
        (TEST_RECORDED, "tests/kernels/recording/test_cpu_recorder.py"),
    ),
    Mutant(
        "used-memory-is-given-out",
        "nanoengine/core/device.py",
        "return int(total * utilization) - (total - free) - needed",
        "return int(total * utilization) - needed",
        "The pool of a GPU is sized as if nothing else was on it.",
        (TEST_CACHE,),
    ),
    Mutant(
        "pool-is-larger-than-all-rows",
        CACHE,
        "num_blocks = min(num_blocks, config.max_num_seqs * blocks_needed(wanted))",
        "num_blocks = num_blocks + 0",
        "The pool takes memory that could never be in use at once.",
        (TEST_CACHE,),
    ),
    Mutant(
        "short-pool-passes",
        CACHE,
        "if longest < (2 if config.max_model_len is None else wanted):",
        "if longest < 2:",
        "A max_model_len that the pool cannot hold is lowered without a word.",
        (TEST_CACHE, TEST_LLM),
    ),
    Mutant(
        "layers-of-a-group-share-their-kv",
        CACHE,
        "self.layers = [self.places[where[layer][1]] for layer in range(len(where))]",
        "self.layers = [self.places[where[layer][0]] for layer in range(len(where))]",
        "Two layers of one KV group write to the same place.",
        (TEST_CACHE, TEST_LLM),
    ),
)
