"""Mutants of attention: what is written where, and which tokens a query sees."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

BACKEND = "nanoengine/attention/backend.py"
TORCH = "nanoengine/attention/torch_reference.py"
TWO = "nanoengine/attention/two_kernels.py"
NATIVE = "nanoengine/attention/native.py"
VARLEN = "nanoengine/attention/torch_varlen.py"
LAYER = "nanoengine/layers/attention.py"
TEST_TORCH = "tests/attention/test_torch_reference.py"

MUTANTS = (
    Mutant(
        "query-does-not-see-itself",
        TORCH,
        "visible = keys <= queries",
        "visible = keys < queries",
        "A query of a prompt does not see its own token.",
        (TEST_TORCH,),
    ),
    Mutant(
        "window-is-one-too-wide",
        TORCH,
        "visible &= keys > queries - spec.window",
        "visible &= keys >= queries - spec.window",
        "A query of a prompt sees one token more than its window has.",
        (TEST_TORCH,),
    ),
    Mutant(
        "decode-window-is-one-too-narrow",
        TORCH,
        "(positions - spec.window + 1).clamp(min=0)",
        "(positions - spec.window + 2).clamp(min=0)",
        "A decoded token sees one token fewer than its window has.",
        (TEST_TORCH,),
    ),
    Mutant(
        "chunk-is-no-border",
        TORCH,
        "        visible &= keys >= queries - queries % spec.chunk\n",
        "        pass\n",
        "Queries of a prompt see tokens of the chunk before their own.",
        (TEST_TORCH,),
    ),
    Mutant(
        "slot-ignores-the-block-table",
        TORCH,
        "return blocks.long() * self.block_size + positions % self.block_size",
        "return positions",
        "K and V are read as if the blocks of a sequence stood one behind the other.",
        (TEST_TORCH,),
    ),
    Mutant(
        "padding-is-written",
        TORCH,
        "if slot_mapping.numel() and slot_mapping.min() < 0:",
        "if False:",
        "Tokens without a slot are written to the end of the cache.",
        ("tests/attention/test_write_kv.py", TEST_TORCH),
    ),
    Mutant(
        "sinks-are-weighed-as-tokens",
        TORCH,
        "            sinks = sinks[:, None]  # the same for every query\n",
        "            sinks = 0 * sinks[:, None]\n",
        "The learned sinks of a prompt's attention count as zero.",
        (TEST_TORCH,),
    ),
    Mutant(
        "cap-is-not-scaled-back",
        TORCH,
        "scores = spec.soft_cap * (scores / spec.soft_cap).tanh()",
        "scores = (scores / spec.soft_cap).tanh()",
        "Capped scores are not multiplied by the cap.",
        (TEST_TORCH,),
    ),
    Mutant(
        "several-queries-see-each-other-late",
        TORCH,
        "            for rows, own_slot, visible in reversed(group.queries):",
        "            for rows, own_slot, visible in group.queries:",
        "Of several queries of a sequence, the K/V of the first are cleared before the later ones have read them.",
        (TEST_TORCH, "tests/attention/test_several_queries.py"),
    ),
    Mutant(
        "int8-scales-are-mixed-up",
        TORCH,
        "numbers, scales = rows.split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)",
        "scales, numbers = rows.split((SCALE_BYTES, rows.shape[-1] - SCALE_BYTES), -1)",
        "The scale of an int8 row is read from the wrong end.",
        ("tests/attention/test_int8_caches.py",),
    ),
    Mutant(
        "drafted-runs-are-cut-by-their-number",
        TWO,
        "count = metadata.num_decode_tokens",
        "count = metadata.num_decodes",
        "Beside runs with drafts, the tokens of chunks are taken to begin too early.",
        ("tests/attention/test_two_kernels.py", "tests/attention/test_several_queries.py"),
    ),
    Mutant(
        "chunks-count-from-the-start-of-the-step",
        BACKEND,
        "query_start_loc=starts - self.num_decode_tokens if first else starts,",
        "query_start_loc=starts,",
        "Chunks behind decodes take the queries of others for their own.",
        ("tests/attention/test_backend.py", "tests/attention/test_two_kernels.py"),
    ),
    Mutant(
        "missing-feature-goes-unnoticed",
        BACKEND,
        'if field.name not in ("scale", *backend.features) and value != field.default:',
        "if False:",
        "A backend without windows is chosen for a model that has some.",
        ("tests/attention/test_backend.py",),
    ),
    Mutant(
        "shared-blocks-are-read-out-of-sight",
        NATIVE,
        "return runs.num_shared if spec.window is None and spec.chunk is None else 0",
        "return runs.num_shared",
        "A layer with a window reads shared blocks that its decodes see no more.",
        ("tests/attention/test_native.py",),
    ),
    Mutant(
        "varlen-window-is-one-too-wide",
        VARLEN,
        "return (-1 if spec.window is None else spec.window - 1, 0)",
        "return (-1 if spec.window is None else spec.window, 0)",
        "The window that torch's own kernel is told has one token too many.",
        ("tests/attention/test_torch_varlen.py",),
    ),
    Mutant(
        "keys-are-written-unrotated",
        LAYER,
        "q, k = apply_rotary(q, angles), apply_rotary(k, angles)",
        "q, _ = apply_rotary(q, angles), apply_rotary(k, angles)",
        "Keys are cached without their rotation.",
        ("tests/layers/test_attention.py",),
    ),
    Mutant(
        "norms-of-q-and-k-are-swapped",
        LAYER,
        "for norm, x in ((self.q_norm, q), (self.k_norm, k)))",
        "for norm, x in ((self.k_norm, q), (self.q_norm, k)))",
        "Queries are normed with the weights for keys.",
        ("tests/layers/test_attention.py",),
    ),
)
