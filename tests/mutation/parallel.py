"""Mutants of tensor parallelism."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

FOLDER = "nanoengine/scale/parallel/"
RUNNER = "nanoengine/scale/worker/remote_runner.py"
EXACT = "tests/scale/parallel/test_exact.py"
CONTEXT = "tests/scale/parallel/test_context.py"
SHARE = "nanoengine/models/layers/share.py"
WITH_ADAPTERS = "tests/features/lora/test_ranks.py"
PROCESSES = "tests/scale/parallel/test_parallel.py"

MUTANTS = (
    Mutant(
        "the-first-token-of-a-rank-is-looked-up-elsewhere",
        FOLDER + "kernels.py",
        "owners = (token_ids[:, None] >= ends).sum(1)",
        "owners = (token_ids[:, None] > ends).sum(1)",
        "The embedding of the first token of a rank's share of the vocabulary is taken from the rank before it.",
        (EXACT,),
    ),
    Mutant(
        "all-ranks-have-the-sinks-of-the-first",
        FOLDER + "capability.py",
        "sinks[self._heads.start : self._heads.stop]",
        "sinks",
        "A rank's heads get the sinks of the first heads of the model.",
        (EXACT,),
    ),
    Mutant(
        "wide-norms-of-k-see-the-heads-of-q",
        FOLDER + "kernels.py",
        "shares.columns(shares.heads if are_queries else shares.kv_heads)",
        "shares.columns(shares.heads)",
        "A norm over all heads of k is computed for a rank of which other columns are kept.",
        (EXACT,),
    ),
    Mutant(
        "biases-of-the-first-rank",
        FOLDER + "weights.py",
        "self._bias = torch.cat([whole[own.start : own.stop] for own in self.ranges])",
        "self._bias = torch.cat([whole[: len(own)] for own in self.ranges])",
        "The outputs of every rank get the biases of the first outputs.",
        (EXACT,),
    ),
    Mutant(
        "a-lost-rank-is-not-noticed",
        FOLDER + "communicator.py",
        "if lost >= 0:",
        "if lost > self.size:",
        "A step in which a rank did not come has a result, of whatever was in memory.",
        ("tests/scale/parallel/test_communicator.py", PROCESSES),
    ),
    Mutant(
        "copies-of-heads-take-no-memory",
        FOLDER + "capability.py",
        "            startup.block_bytes += copies * startup.bytes_of_block(startup.groups) // config.num_kv_heads\n",
        "",
        "Where several ranks have the same K/V heads, the pool takes more memory than was asked for.",
        (PROCESSES,),
    ),
    Mutant(
        "only-rank-0-is-listened-to",
        RUNNER,
        "waiting = set(range(self.size))",
        "waiting = {0}",
        "What went wrong in another rank, or that it died, is not known until rank 0 has waited for it in vain.",
        (PROCESSES,),
    ),
    Mutant(
        "a-rank-keeps-its-tokens-where-one-device-does",
        FOLDER + "context.py",
        "offsets // (interleave * ranks) * interleave",
        "offsets // interleave * interleave",
        "Tokens of a shared context are written beyond their block.",
        (CONTEXT,),
    ),
    Mutant(
        "pieces-of-a-chunk-see-what-comes-later",
        FOLDER + "context.py",
        "seq_lens=(runs.seq_lens[i : i + 1] - (count - last)).clamp(min=0)",
        "seq_lens=runs.seq_lens[i : i + 1]",
        "Where a chunk is attended to in pieces, tokens of the first see those of the last.",
        (CONTEXT,),
    ),
    Mutant(
        "all-ranks-have-the-channels-of-the-first",
        SHARE,
        "return torch.cat([whole[..., own.start : own.stop] for own in ranges], dim=-1)",
        "return torch.cat([whole[..., : len(own)] for own in ranges], dim=-1)",
        "Heads of a rank fade, and are convolved, as the first heads of the model.",
        (EXACT, "tests/models/layers/test_share.py"),
    ),
    Mutant(
        "a-norm-of-a-part-of-a-group",
        FOLDER + "group.py",
        "self.has_whole_groups = size <= facts.num_groups",
        "self.has_whole_groups = True",
        "Where heads of a group are on several ranks, each norms its own alone.",
        (EXACT,),
    ),
    Mutant(
        "gates-of-one-rank",
        FOLDER + "kernels.py",
        "            gate = self.group.gather(gate, shares.columns(shares.heads))\n",
        "            gate = gate.repeat(1, x.shape[1] // gate.shape[1] + 1)[:, : x.shape[1]]\n",
        "What attention says of the heads of other ranks is gated by those of this one.",
        (EXACT,),
    ),
    Mutant(
        "rows-of-b-of-the-first-rank",
        "nanoengine/features/lora/products.py",
        "return int((rows < 0).sum()), b[rows[(rows >= 0) & (rows < len(b))]]",
        "return int((rows < 0).sum()), b[: int(((rows >= 0) & (rows < len(b))).sum())]",
        "Every rank adds what an adapter adds to the first outputs.",
        (WITH_ADAPTERS,),
    ),
    Mutant(
        "a-worker-reads-adapters-itself",
        "nanoengine/scale/worker/capability.py",
        "        replaced(config, NOT_THERE),\n",
        "        config,\n",
        "A worker cannot be started anew once the folder of an adapter is gone.",
        (WITH_ADAPTERS,),
    ),
    Mutant(
        "a-worker-may-take-any-time-to-start",
        RUNNER,
        "if now >= end:",
        "if False:",
        "A start that hangs is waited for without end.",
        ("tests/scale/worker/test_worker.py",),
    ),
)
