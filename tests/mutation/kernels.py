"""Mutants of kernels: in plain torch, and in C++, which is compiled for each of them."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

CORE = "nanoengine/core/kernels.py"
TORCH = "nanoengine/kernels/reference/operations.py"
TEST_TORCH = "tests/kernels/reference/test_operations.py"
COMPILER = "nanoengine/kernels/native/compiler.py"
CPP = "nanoengine/kernels/native/cpp/"
TEST_NATIVE = "tests/kernels/attention/test_contract.py"

MUTANTS = (
    Mutant(
        "padding-has-a-slot",
        CORE,
        "slots = torch.where(padding, -1, blocks * block_size + positions % block_size)",
        "slots = blocks * block_size + positions % block_size",
        "Padding of a recorded step is written to the null block.",
        ("tests/core/test_kernels.py",),
    ),
    Mutant(
        "slot-is-off-by-one",
        CORE,
        "blocks * block_size + positions % block_size)",
        "blocks * block_size + (positions + 1) % block_size)",
        "The last token of a block is written to its first slot.",
        ("tests/core/test_kernels.py",),
    ),
    Mutant(
        "token-of-another-row-goes-on",
        CORE,
        "last_tokens.index_select(0, rows).clamp_(min=0)",
        "last_tokens[: len(rows)].clamp(min=0)",
        "A decode goes on from the last token of another row.",
        ("tests/core/test_kernels.py",),
    ),
    Mutant(
        "residual-is-normed-alone",
        CORE,
        "        residual = x + residual\n        return self.rms_norm(residual, weight, eps), residual",
        "        return self.rms_norm(x + residual, weight, eps), residual",
        "The residual is passed on without what the part before has added.",
        ("tests/core/test_layers.py",),
    ),
    Mutant(
        "experts-weigh-by-place",
        TORCH,
        "total.index_add_(0, tokens, results * factors[tokens, choices, None])",
        "total.index_add_(0, tokens, results * factors[tokens, 0, None])",
        "All experts of a token count as much as its first.",
        (TEST_TORCH, "tests/models/layers/test_experts.py"),
    ),
    Mutant(
        "gate-and-up-are-swapped",
        "nanoengine/kernels/reference/gates.py",
        "gate, up = both.chunk(2, dim=-1)",
        "up, gate = both.chunk(2, dim=-1)",
        "The gate of an MLP is applied to the wrong half.",
        ("tests/kernels/test_contract.py", TEST_TORCH),
    ),
    Mutant(
        "native-window-begins-a-token-late",
        CPP + "attention_spec.h",
        "position + 1 - size_t(window) : 0;",
        "position + 2 - size_t(window) : 0;",
        "A native kernel with a window does not see its first token.",
        (TEST_NATIVE,),
    ),
    Mutant(
        "native-chunks-see-everything",
        CPP + "attention_spec.h",
        "return position - position % size_t(-window);",
        "return 0;",
        "A native kernel sees all tokens before the chunk of a query.",
        (TEST_NATIVE,),
    ),
    Mutant(
        "scales-that-nobody-sees-count",
        CPP + "attention_parts.h",
        "std::fill(weights, weights + hidden, 0.0f);",
        "",
        "Of an int8 cache, the scales of tokens before the window are multiplied with their weights of 0: they may be NaN.",
        ("tests/kernels/attention/test_contract.py",),
    ),
    Mutant(
        "native-decode-does-not-see-itself",
        CPP + "attention_decode.cpp",
        "scratch.seen[h] = std::min(position + 1, part.last) - part.first;",
        "scratch.seen[h] = std::min(position, part.last) - part.first;",
        "A decoded token does not see itself in the native kernel.",
        (TEST_NATIVE,),
    ),
    Mutant(
        "native-tiled-heads-stand-in-groups",
        CPP + "recurrence.cpp",
        "p.tiled ? head % p.groups : head / (p.heads / p.groups)",
        "head / (p.heads / p.groups)",
        "The native delta rule pairs heads with keys as Hugging Face's weights stand, whatever the file's order.",
        ("tests/kernels/native/test_recurrences.py", "tests/models/gguf/test_hybrids.py"),
    ),
    Mutant(
        "native-write-takes-the-wrong-slot",
        CPP + "attention_write.cpp",
        "offset = slot % TILE, tile = tile_of(slot);",
        "offset = (slot + 1) % TILE, tile = tile_of(slot);",
        "The native kernel writes a token one place too far in its tile.",
        (TEST_NATIVE,),
    ),
    Mutant(
        "native-draw-forgets-equal-logits",
        CPP + "sampling.cpp",
        "const bool better = best[i] > all.value || (best[i] == all.value && found[i] < all.token);",
        "const bool better = best[i] >= all.value;",
        "Of equal logits, the native kernel takes another than the lowest token id.",
        ("tests/kernels/test_sampling.py", "tests/kernels/native/test_operations.py"),
    ),
    Mutant(
        "native-minimum-is-the-scale",
        CPP + "pack.cpp",
        "        put16(to, 1, output, block + 2);\n    }\n};\n\nstruct Q5_0",
        "        put16(to, 1, output, block);\n    }\n};\n\nstruct Q5_0",
        "The least number of a Q4_1 block is taken from where its scale is.",
        ("tests/kernels/test_contract.py", "tests/kernels/native/test_weights.py"),
    ),
    Mutant(
        "native-fifth-bit-is-lost",
        CPP + "pack.cpp",
        "numbers[i] |= (from[i / 8] >> i % 8 & 1) << 4;",
        "numbers[i] |= (from[i / 16] >> i % 8 & 1) << 4;",
        "The native kernel takes the fifth bits of a block from the wrong bytes.",
        ("tests/kernels/native/test_weights.py", "tests/kernels/test_contract.py"),
    ),
    Mutant(
        "bfloat16-forgets-the-zero",
        CPP + "factor_rows.h",
        "const Floats offset = has_minimums ? minimum : scale * (float)-zero;",
        "const Floats offset = minimum;",
        "Activations of bfloat16 meet numbers from which their zero is not subtracted.",
        ("tests/kernels/test_contract.py::test_native_products_of_dequantized_weights",),
    ),
    Mutant(
        "vectors-add-denormals",
        CPP + "amx_vectors.h",
        "_mm_setcsr(before | DENORMALS_ARE_0);",
        "_mm_setcsr(before);",
        "Few rows add up what is denormal, where tiles take it as 0.",
        ("tests/kernels/test_targets.py::test_few_rows_in_vectors_have_the_bits_of_tiles",),
    ),
    Mutant(
        "tiles-keep-the-shape-of-another-product",
        CPP + "amx.h",
        "if (tile_state.shape == shape) return;",
        "if (tile_state.shape) return;",
        "The rest of some rows is multiplied in tiles that are shaped for more of them.",
        ("tests/kernels/test_targets.py::test_quantized_operations_in_tiles",),
    ),
    Mutant(
        "sixteen-tokens-are-taken-for-a-tile",
        CPP + "attention_write.cpp",
        "if (slots[i] != slots[0] + (int64_t)i) return false;",
        "if (false) return false;",
        "Tokens of which some are not to be written are written as if they were a whole tile.",
        ("tests/kernels/native/test_attention.py::test_tokens_of_whole_tiles_are_written_as_they_are_alone",),
    ),
    Mutant(
        "library-is-not-verified",
        COMPILER,
        "_checksum(content[:-CHECKSUM_BYTES]) == content[-CHECKSUM_BYTES:]",
        "bool(content)",
        "A library that was cut off is loaded, and kills the process.",
        ("tests/kernels/native/test_compiler.py",),
    ),
    Mutant(
        "library-of-others-is-loaded",
        COMPILER,
        "if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & OTHERS_MAY_WRITE:",
        "if facts.st_uid not in (os.geteuid(), 0):",
        "A library that others could write is loaded.",
        ("tests/kernels/native/test_compiler.py",),
    ),
)
