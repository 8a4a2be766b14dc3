"""Mutants of the model runner: a plan to tensors, rows, recordings, K/V on its way between memories, sizes."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

INPUTS = "nanoengine/runner/inputs.py"
ROWS = "nanoengine/runner/rows.py"
RUNNER = "nanoengine/runner/model_runner.py"
GRAPHS = "nanoengine/runner/graphs.py"
MOVER = "nanoengine/runner/kv_mover.py"
FILES = "nanoengine/runner/kv_files.py"
SIZING = "nanoengine/runner/kv_sizing.py"
CACHE = "nanoengine/runner/kv_cache.py"
TEST_INPUTS = "tests/runner/test_inputs.py"
TEST_SIZING = "tests/runner/test_kv_sizing.py"

MUTANTS = (
    Mutant(
        "decode-samples-at-the-position-before",
        INPUTS,
        "positions[:count] = decodes.num_computed + 1",
        "positions[:count] = decodes.num_computed",
        "A decoded token is drawn with the noise of the position before its own.",
        (TEST_INPUTS,),
    ),
    Mutant(
        "chunk-samples-from-the-wrong-token",
        INPUTS,
        "sampled_tokens[:] = [end - 1 for _, end, _ in pairs]",
        "sampled_tokens[:] = [end - 2 for _, end, _ in pairs]",
        "A prompt samples from its last token but one.",
        (TEST_INPUTS,),
    ),
    Mutant(
        "padding-runs-in-a-real-row",
        INPUTS,
        "row[count:] = sampled_rows[count:] = rows.padding_row",
        "row[count:] = sampled_rows[count:] = 0",
        "The padding of a recorded step writes to the K/V and the last token of a running sequence.",
        (TEST_INPUTS, "tests/runner/test_model_runner_graphs.py"),
    ),
    Mutant(
        "block-table-lacks-the-last-block",
        INPUTS,
        "num_blocks = -(-max(seq_lens) // block_size)",
        "num_blocks = max(seq_lens) // block_size or 1",
        "The last block of the longest sequence is missing from the block tables of a step.",
        (TEST_INPUTS,),
    ),
    Mutant(
        "draft-positions-stand-still",
        INPUTS,
        "positions[first:end] = np.arange(run.num_computed + 1, run.num_computed + 1 + run.num_new)",
        "positions[first:end] = run.num_computed + 1",
        "All samples of a run with drafts are drawn with the noise of its first position.",
        ("tests/runner/test_drafted_steps.py",),
    ),
    Mutant(
        "groups-share-one-block-table",
        INPUTS,
        "metadata = [of_groups[group] for group in kv_cache.groups]",
        "metadata = [of_groups[0] for group in kv_cache.groups]",
        "Layers with a window use the block table of those without.",
        ("tests/e2e/test_windows_every_way.py",),
    ),
    Mutant(
        "table-entry-stays-stale",
        ROWS,
        "first = (group * num_rows + row) * width + entry",
        "first = (group * num_rows + row) * width",
        "A changed entry of a block table is written to the start of the table.",
        ("tests/runner/test_rows.py",),
    ),
    Mutant(
        "row-keeps-the-last-token-of-another",
        ROWS,
        "            self.last_tokens.index_copy_(0, targets, tokens)\n",
        "            pass\n",
        "A row that begins anew goes on from the last token of the sequence before.",
        ("tests/runner/test_rows.py",),
    ),
    Mutant(
        "row-keeps-the-wishes-of-another",
        ROWS,
        "            self.prompt_logprobs.pop(start.row, None)\n            if",
        "            if",
        "A row that begins anew reports log probabilities of its prompt because the sequence before asked for them.",
        ("tests/runner/test_rows.py",),
    ),
    Mutant(
        "broken-rows-are-run",
        RUNNER,
        "            self._broken.update(_rows_of(step.plan))\n",
        "            pass\n",
        "After a failed step, the next plan in flight computes its rows although nobody knows what they hold.",
        ("tests/runner/test_broken_rows.py",),
    ),
    Mutant(
        "dropped-samples-shift-the-others",
        RUNNER,
        "        number += len(chunk.samples)\n    decodes",
        "    decodes",
        "When the run of a broken row is dropped, tokens behind it go to the wrong sequences.",
        ("tests/runner/test_broken_rows.py",),
    ),
    Mutant(
        "prompt-logprobs-are-shifted",
        RUNNER,
        "            first += chunk.num_new\n        return parts",
        "        return parts",
        "Log probabilities of the second prompt of a step come from the first one's hidden states.",
        ("tests/runner/test_prompt_logprobs.py", "tests/runner/test_model_runner.py", "tests/runner/test_prompts.py"),
    ),
    Mutant(
        "exact-bucket-is-passed-over",
        GRAPHS,
        "place = bisect_left(buckets, size)",
        "place = bisect_left(buckets, size + 1)",
        "A batch that a recording fits exactly runs in the next larger one.",
        ("tests/runner/test_graphs.py",),
    ),
    Mutant(
        "bucket-with-too-few-tokens-is-chosen",
        GRAPHS,
        "(bucket for bucket in buckets if bucket[0] >= size[0] and bucket[1] >= size[1])",
        "(bucket for bucket in buckets if bucket[0] * bucket[1] >= size[0] * size[1])",
        "A step with drafts is replayed in a recording whose runs are too short.",
        ("tests/runner/test_graphs.py", "tests/runner/test_drafted_graphs.py"),
    ),
    Mutant(
        "answered-calls-are-recorded",
        "nanoengine/recording/cpu_recorder.py",
        "elif not made and name not in TELLS_SHAPE:",
        "elif False:",
        "A step that reads a number from a tensor is recorded, and replayed with the number of the first time.",
        ("tests/runner/test_cpu_recorder.py",),
    ),
    Mutant(
        "copies-overtake-each-other",
        MOVER,
        "            or transfer.source in written\n",
        "",
        "A copy reads a block before an earlier copy of the same plan has written it.",
        ("tests/runner/test_kv_mover.py",),
    ),
    Mutant(
        "file-gets-what-is-read-into-its-slot",
        MOVER,
        "for order in plan.writes if order.source in slots}",
        "for order in plan.writes if False}",
        "A file is written from a slot of host memory after another file was read into it.",
        ("tests/runner/test_kv_mover.py",),
        "The block is nearly always set aside before the thread of the files has read the other one.",
    ),
    Mutant(
        "file-is-read-twice-at-once",
        FILES,
        "        if order.path in self._reading:\n            return\n",
        "",
        "A file that is being read is read once more, and answered twice.",
        ("tests/runner/test_kv_files.py",),
    ),
    Mutant(
        "failed-read-is-reported-as-done",
        FILES,
        "self._done.put(FileDone(path, problem))",
        "self._done.put(FileDone(path, None))",
        "A file that could not be read or written is reported as if it had been.",
        ("tests/runner/test_kv_files.py",),
    ),
    Mutant(
        "null-block-is-not-counted",
        SIZING,
        "return max(num_bytes // block_bytes - 1, 0), source  # one more is the null block",
        "return num_bytes // block_bytes, source",
        "The pool takes a block more than the memory that it was given.",
        (TEST_SIZING,),
    ),
    Mutant(
        "used-memory-is-given-out",
        SIZING,
        "return int(total * utilization) - (total - free) - needed",
        "return int(total * utilization) - needed",
        "The pool of a GPU is sized as if nothing else was on it.",
        (TEST_SIZING,),
    ),
    Mutant(
        "short-pool-passes",
        SIZING,
        "if max_model_len < (wanted_len if config.max_model_len is not None else 2):",
        "if max_model_len < 2:",
        "A max_model_len that the pool cannot hold is lowered without a word.",
        (TEST_SIZING,),
    ),
    Mutant(
        "layers-of-a-group-share-their-kv",
        CACHE,
        "self.layers = [self.places[where[layer][1]] for layer in range(model.num_layers)]",
        "self.layers = [self.places[where[layer][0]] for layer in range(model.num_layers)]",
        "Two layers of one KV group write to the same place.",
        ("tests/runner/test_kv_cache.py",),
    ),
    Mutant(
        "guesses-come-back-in-the-wrong-order",
        "nanoengine/runner/draft_model.py",
        "return guesses.index_select(0, original)",
        "return guesses",
        "Guesses of the draft model go to the sequences in the order of their lengths.",
        ("tests/runner/test_draft_model.py",),
        "In the tests of the draft model, all runs of a step have equally many drafts; a wrong guess changes no token.",
    ),
)
