"""Mutants of kernels: in plain torch, and in C++, which is compiled for each of them."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

TORCH = "nanoengine/kernels/torch_kernels.py"
TEST_TORCH = "tests/kernels/test_torch_kernels.py"
CPP = "nanoengine/kernels/cpp/"
TEST_NATIVE = "tests/attention/test_native.py"

MUTANTS = (
    Mutant(
        "padding-has-a-slot",
        TORCH,
        "slots = torch.where(padding, -1, blocks * block_size + positions % block_size)",
        "slots = blocks * block_size + positions % block_size",
        "Padding of a recorded step is written to the null block.",
        (TEST_TORCH,),
    ),
    Mutant(
        "slot-is-off-by-one",
        TORCH,
        "blocks * block_size + positions % block_size)",
        "blocks * block_size + (positions + 1) % block_size)",
        "The last token of a block is written to its first slot.",
        (TEST_TORCH,),
    ),
    Mutant(
        "token-of-another-row-goes-on",
        TORCH,
        "input_ids = torch.where(token_ids < 0, last_tokens.index_select(0, rows).clamp_(min=0), token_ids)",
        "input_ids = torch.where(token_ids < 0, last_tokens[: len(rows)].clamp(min=0), token_ids)",
        "A decode goes on from the last token of another row.",
        (TEST_TORCH,),
    ),
    Mutant(
        "residual-is-normed-alone",
        TORCH,
        "        residual = x + residual\n        return self.rms_norm(residual, weight, eps), residual",
        "        return self.rms_norm(x + residual, weight, eps), residual",
        "The residual is passed on without what the part before has added.",
        (TEST_TORCH,),
    ),
    Mutant(
        "experts-weigh-by-place",
        TORCH,
        "total.index_add_(0, tokens, results * factors[tokens, choices, None])",
        "total.index_add_(0, tokens, results * factors[tokens, 0, None])",
        "All experts of a token count as much as its first.",
        (TEST_TORCH, "tests/layers/test_experts.py"),
    ),
    Mutant(
        "gate-and-up-are-swapped",
        "nanoengine/kernels/gates.py",
        "gate, up = both.chunk(2, dim=-1)",
        "up, gate = both.chunk(2, dim=-1)",
        "The gate of an MLP is applied to the wrong half.",
        ("tests/kernels/test_gates.py", TEST_TORCH),
    ),
    Mutant(
        "native-window-begins-a-token-late",
        CPP + "attention_spec.h",
        "position + 1 - window : 0;",
        "position + 2 - window : 0;",
        "A native kernel with a window does not see its first token.",
        (TEST_NATIVE,),
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
        "native-write-takes-the-wrong-slot",
        CPP + "attention_write.cpp",
        "const size_t slot = written ? slots[token] : 0, offset = slot % TILE;",
        "const size_t slot = written ? slots[token] : 0, offset = (slot + 1) % TILE;",
        "The native kernel writes a token one place too far in its tile.",
        (TEST_NATIVE,),
    ),
    Mutant(
        "native-draw-forgets-equal-logits",
        CPP + "sampling.cpp",
        "const bool better = best[i] > all.value || (best[i] == all.value && found[i] < all.token);",
        "const bool better = best[i] >= all.value;",
        "Of equal logits, the native kernel takes another than the lowest token id.",
        ("tests/kernels/test_sampling.py", "tests/kernels/test_native_kernels.py"),
    ),
    Mutant(
        "native-zero-point-is-of-another-row",
        CPP + "quantized_pack.cpp",
        "if (zeros) header[format.scale_bytes() + output] = zeros[row * spans + i];",
        "if (zeros) header[format.scale_bytes() + output] = zeros[i];",
        "All rows of a quantized matrix get the zero points of the first.",
        ("tests/kernels/test_quantized_operations.py", "tests/kernels/test_native_weights.py"),
    ),
    Mutant(
        "native-fifth-bit-is-lost",
        CPP + "dequantize.cpp",
        "store_floats(out + 16 + i, real((packed >> 4 | fifth_bits(block + 2, 16 + i)) - 16) * scale);",
        "store_floats(out + 16 + i, real((packed >> 4 | fifth_bits(block + 2, i)) - 16) * scale);",
        "The native kernel takes the fifth bits of the second half of a Q5_0 block from the first half.",
        ("tests/gguf/test_quants.py",),
    ),
)
