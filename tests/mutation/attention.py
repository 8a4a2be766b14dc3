"""Mutants of attention: what is written where, and which tokens a query sees."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

BACKEND = "nanoengine/kernels/capability.py"
TORCH = "nanoengine/kernels/reference/attention.py"
NATIVE = "nanoengine/kernels/native/attention.py"
FLASH = "nanoengine/kernels/flash_attn.py"
LAYER = "nanoengine/core/layers.py"
CORE = "nanoengine/core/torch_attention.py"
METADATA = "nanoengine/core/attention.py"
TORCH_FLASH = "nanoengine/core/torch_flash.py"
TEST_FLASH = "tests/core/test_flash_attention.py"
TEST_CORE = "tests/core/test_torch_attention.py"
TEST_TORCH = "tests/kernels/attention/test_contract.py"

MUTANTS = (
    Mutant(
        "query-does-not-see-itself",
        CORE,
        "positions[:last] <= positions[first:last, None]",
        "positions[:last] < positions[first:last, None]",
        "A query of a prompt does not see its own token.",
        (TEST_CORE,),
    ),
    Mutant(
        "window-is-one-too-wide",
        TORCH,
        "else spec.window - 1))",
        "else spec.window))",
        "A query of a prompt sees one token more than its window has.",
        (TEST_TORCH,),
    ),
    Mutant(
        "chunk-begins-a-token-late",
        TORCH,
        "(queries % spec.window if",
        "((queries - 1) % spec.window if",
        "A query of a prompt sees a token of the chunk before its own.",
        (TEST_TORCH,),
    ),
    Mutant(
        "decode-window-is-one-too-narrow",
        TORCH,
        "max(0, position - spec.window + 1)",
        "max(0, position - spec.window + 2)",
        "A decoded token sees one token fewer than its window has.",
        (TEST_TORCH,),
    ),
    Mutant(
        "slot-ignores-the-block-table",
        CORE,
        "return blocks.long() * self.block_size + positions % self.block_size",
        "return positions",
        "K and V are read as if the blocks of a sequence stood one behind the other.",
        (TEST_CORE,),
    ),
    Mutant(
        "padding-is-written",
        CORE,
        "if slot_mapping.numel() and slot_mapping.min() < 0:",
        "if False:",
        "Tokens without a slot are written to the end of the cache.",
        ("tests/kernels/attention/test_contract.py", TEST_CORE),
    ),
    Mutant(
        "sinks-are-weighed-as-tokens",
        TORCH,
        "own = sinks.view(q.shape[1], -1)",
        "own = 0 * sinks.view(q.shape[1], -1)",
        "The learned sinks of attention count as zero.",
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
        "several-queries-see-those-behind-them",
        TORCH,
        "later = [count - 1 - j for",
        "later = [0 * j for",
        "Of several queries of a sequence, the first see the tokens of those behind them.",
        (TEST_TORCH, "tests/kernels/attention/test_contract.py"),
    ),
    Mutant(
        "int8-scales-are-mixed-up",
        TORCH,
        "numbers, scales = rows.transpose(1, 2).split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)",
        "scales, numbers = rows.transpose(1, 2).split((SCALE_BYTES, rows.shape[-1] - SCALE_BYTES), -1)",
        "The scale of an int8 row is read from the wrong end.",
        ("tests/kernels/attention/test_contract.py",),
    ),
    Mutant(
        "drafted-runs-are-cut-by-their-number",
        METADATA,
        "count = metadata.num_decode_tokens",
        "count = metadata.num_decodes",
        "Beside runs with drafts, the tokens of chunks are taken to begin too early.",
        ("tests/kernels/attention/test_contract.py",),
    ),
    Mutant(
        "chunks-count-from-the-start-of-the-step",
        METADATA,
        "starts - self.num_decode_tokens if first else starts,",
        "starts,",
        "Chunks behind decodes take the queries of others for their own.",
        (TEST_FLASH,),
    ),
    Mutant(
        "missing-feature-goes-unnoticed",
        BACKEND,
        'if field.name not in ("scale", *backend.features) and value != field.default:',
        "if False:",
        "A backend without windows is chosen for a model that has some.",
        ("tests/kernels/attention/test_backend.py",),
    ),
    Mutant(
        "shared-blocks-are-read-out-of-sight",
        NATIVE,
        "return runs.num_shared if spec.window is None else 0",
        "return runs.num_shared",
        "A layer with a window reads shared blocks that its decodes see no more.",
        ("tests/kernels/attention/test_one_number.py",),
    ),
    Mutant(
        "flash-window-is-one-too-wide",
        FLASH,
        "NO_WINDOW if spec.window is None else (spec.window - 1, 0)",
        "NO_WINDOW if spec.window is None else (spec.window, 0)",
        "The window that FlashAttention is told has one token too many.",
        ("tests/kernels/test_flash_attn.py",),
    ),
    Mutant(
        "torch-may-cut-any-sequence-into-parts",
        TORCH_FLASH,
        "num_splits=None if is_alone and q.shape[1] > k.shape[2] else 1",
        "num_splits=None",
        "Torch's copy of flash-attn puts parts of sequences into wrong rows.",
        (TEST_FLASH,),
    ),
    Mutant(
        "torch-sees-all-without-a-mask",
        TORCH_FLASH,
        'is_alone = how["max_seqlen_q"] == 1 and window == NO_WINDOW',
        "is_alone = window == NO_WINDOW",
        "Where torch's copy of flash-attn computes, tokens see those behind them.",
        (TEST_FLASH,),
    ),
    Mutant(
        "blocks-of-one-size-for-all-backends",
        "nanoengine/core/flash_attention.py",
        "default_block_size = PAGE",
        "default_block_size = 16",
        "flash-attn is passed over, since the blocks that nobody asked for are too small for it.",
        (TEST_FLASH,),
    ),
    Mutant(
        "keys-are-written-unrotated",
        LAYER,
        "q, k = apply_rotary(q, angles), apply_rotary(k, angles)",
        "q, _ = apply_rotary(q, angles), apply_rotary(k, angles)",
        "Keys are cached without their rotation.",
        ("tests/kernels/attention/test_contract.py",),
    ),
    Mutant(
        "norms-of-q-and-k-are-swapped",
        LAYER,
        "zip(self.norms, (q, k), strict=True)",
        "zip(self.norms[::-1], (q, k), strict=True)",
        "Queries are normed with the weights for keys.",
        ("tests/kernels/attention/test_contract.py",),
    ),
)
