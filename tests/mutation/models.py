"""Mutants of models: rotations, layers, what a family's config means, and loading."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

ROTARY = "nanoengine/models/layers/rotary.py"
SLOTS = "nanoengine/models/layers/slots.py"
DECODER = "nanoengine/models/decoder.py"
LOADER = "nanoengine/models/loader.py"
ROPE = "nanoengine/models/rope_config.py"
FAMILIES = "nanoengine/models/families/"
CORE_LAYERS = "nanoengine/core/layers.py"
WEIGHTS = "nanoengine/core/weights.py"
TEST_LAYERS = "tests/core/test_layers.py"
TEST_FAMILIES = "tests/models/test_architectures.py"
TEST_LLAMA4 = "tests/models/test_llama4.py"
TEST_LOADER = "tests/models/test_loader.py"
MEANING = f"{TEST_FAMILIES}::test_what_a_file_says_and_leaves_out_means_what_it_means_to_transformers"


def logits_of(shape: str) -> tuple[str, ...]:
    """The test that compares a model of this name, one of tests/models/families.py, with transformers."""
    return (f"{TEST_FAMILIES}::test_logits_at_every_position_are_those_of_transformers[{shape}]",)


MUTANTS = (
    Mutant(
        "rotation-turns-the-wrong-way",
        CORE_LAYERS,
        "torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)",
        "torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)",
        "Heads are rotated backwards.",
        (TEST_LAYERS,),
    ),
    Mutant(
        "rotation-pairs-neighbours",
        CORE_LAYERS,
        "first, second = x.float().chunk(2, dim=-1)",
        "first, second = x.float()[..., ::2], x.float()[..., 1::2]",
        "Dimensions are rotated with their neighbours, and not with those half a head away.",
        (TEST_LAYERS,),
    ),
    Mutant(
        "partial-rotation-pairs-wrongly",
        ROTARY,
        "return [*one, *still[:middle], *other, *still[middle:]]",
        "return [*one, *other, *still]",
        "A head that rotates in part rotates the wrong pairs.",
        logits_of("Phi3, half rotated"),
    ),
    Mutant(
        "yarn-mixes-the-wrong-way",
        ROTARY,
        "kept = 1 - slowed",
        "kept = slowed",
        "YaRN slows the fast frequencies down, and keeps the slow ones.",
        logits_of("Llama, rope yarn"),
    ),
    Mutant(
        "llama3-leaves-slow-frequencies",
        ROTARY,
        "torch.where(wavelengths > slow, plain / rope.factor, torch.where(wavelengths < fast, plain, mixed))",
        "torch.where(wavelengths < fast, plain, mixed)",
        "Llama 3's slowest frequencies are mixed beyond the factor.",
        logits_of("Llama, rope llama3"),
    ),
    Mutant(
        "longrope-begins-a-position-early",
        ROTARY,
        'is_long = rope.kind == "factors" or max_len > rope.trained_positions',
        'is_long = rope.kind == "factors" or max_len >= rope.trained_positions',
        "A context of exactly the trained length is rotated by the long factors.",
        logits_of("Phi3, partial, short factors"),
    ),
    Mutant(
        "router-factors-are-not-normalized",
        "nanoengine/models/layers/experts.py",
        "            factors = factors / factors.sum(-1, keepdim=True)\n",
        "            pass\n",
        "The outputs of the chosen experts are not divided by the sum of their factors.",
        ("tests/models/layers/test_experts.py",),
    ),
    Mutant(
        "interleaved-gate-and-up-are-swapped",
        SLOTS,
        "place.copy_(source[..., first :: len(self.places)])",
        "place.copy_(source[..., len(self.places) - 1 - first :: len(self.places)])",
        "Biases of gates and ups that stand in turn are swapped.",
        ("tests/models/layers/test_slots.py",),
    ),
    Mutant(
        "projections-overlap",
        CORE_LAYERS,
        "            first += count\n",
        "            first += counts[0]\n",
        "The rows of v are loaded to the wrong place of the fused weight.",
        (TEST_LAYERS,),
    ),
    Mutant(
        "norm-offset-is-forgotten",
        SLOTS,
        "tensor.float() + offset",
        "tensor.float()",
        "Norms of Gemma, whose weights are stored less one, are loaded as they are.",
        ("tests/models/layers/test_slots.py",),
    ),
    Mutant(
        "embedding-scale-is-not-rounded",
        DECODER,
        "if config.embedding_scale_is_rounded:",
        "if False:",
        "Gemma's embedding scale is not rounded to the dtype of the model.",
        ("tests/models/test_decoder.py",),
    ),
    Mutant(
        "residual-scale-is-skipped",
        DECODER,
        "return hidden if self.residual_scale == 1.0 else hidden * self.residual_scale",
        "return hidden",
        "Granite's parts are added to the residual unscaled.",
        logits_of("Granite"),
    ),
    Mutant(
        "logits-are-not-divided",
        DECODER,
        "            logits.div_(self.config.logits_divisor)\n",
        "            pass\n",
        "Granite's logits are not divided.",
        logits_of("Granite"),
    ),
    Mutant(
        "gemma-slides-in-every-layer-but-the-first",
        FAMILIES + "windows.py",
        "[FULL if (i + 1) % period == 0 else SLIDING for i in range(count)]",
        "[FULL if i % period == 0 else SLIDING for i in range(count)]",
        "The layers without a window are others than those of the model.",
        (MEANING,),
    ),
    Mutant(
        "qwen-window-begins-a-layer-late",
        FAMILIES + "windows.py",
        "[SLIDING if i >= first else FULL for i in range(count)]",
        "[SLIDING if i > first else FULL for i in range(count)]",
        "Qwen's window begins one layer behind max_window_layers.",
        (MEANING,),
    ),
    Mutant(
        "mixtral-gate-and-up-are-swapped",
        FAMILIES + "mistral.py",
        '("w1", "w3", "w2")',
        '("w3", "w1", "w2")',
        "Mixtral's tensors for gate and up are swapped.",
        logits_of("Mixtral"),
    ),
    Mutant(
        "smollm3-rotates-the-wrong-layers",
        FAMILIES + "common.py",
        "[int((i + 1) % interval != 0) for i in range(count)]",
        "[int(i % interval != 0) for i in range(count)]",
        "SmolLM3 leaves out the rotation of other layers than the model does.",
        (MEANING,),
    ),
    Mutant(
        "llama4-is-sparse-in-other-layers",
        FAMILIES + "llama4.py",
        "range(step - 1, count, step)",
        "range(0, count, step)",
        "Experts stand in other layers than those of the model.",
        (TEST_LLAMA4,),
    ),
    Mutant(
        "llama4-has-chunks-where-nothing-rotates",
        FAMILIES + "llama4.py",
        "CHUNKED if rotates[i] and size else FULL",
        "CHUNKED if size else FULL",
        "Layers that see everything see a chunk.",
        (TEST_LLAMA4,),
    ),
    Mutant(
        "queries-do-not-grow",
        DECODER,
        "if rope is None and config.query_growth:",
        "if False:",
        "Queries of layers without rotation are not multiplied.",
        logits_of("Llama 4"),
    ),
    Mutant(
        "heads-are-normed-where-nothing-rotates",
        DECODER,
        '"plain": (config.head_dim, config.head_dim) if rope is not None else (),',
        '"plain": (config.head_dim, config.head_dim),',
        "Queries and keys of layers without rotation are normed.",
        logits_of("Llama 4"),
    ),
    Mutant(
        "pairs-beside-each-other-are-half-a-head-apart",
        DECODER,
        "interleaved=rope.interleaved)",
        "interleaved=False)",
        "Heads rotate other pairs than the model.",
        logits_of("Llama 4"),
    ),
    Mutant(
        "outputs-of-experts-are-weighed",
        "nanoengine/models/layers/experts.py",
        "x, factors = self.kernels.sigmoid_gate(x, factors), torch.ones_like(factors, dtype=torch.float32)",
        "factors = factors.float().sigmoid()",
        "The factor of an expert multiplies what comes out of it, and not what goes in.",
        logits_of("Llama 4"),
    ),
    Mutant(
        "qwen3-moe-is-sparse-everywhere",
        FAMILIES + "qwen.py",
        "i not in dense and (i + 1) % step == 0 for",
        "i not in dense for",
        "Qwen3-MoE has experts in layers that decoder_sparse_step leaves dense.",
        logits_of("Qwen3-MoE, some layers dense"),
    ),
    Mutant(
        "olmo-norms-each-head",
        FAMILIES + "olmo.py",
        'qk_norm="full"',
        'qk_norm="head"',
        "OLMo's norms of q and k are over single heads.",
        logits_of("OLMo2"),
    ),
    Mutant(
        "null-cap-counts-as-missing",
        FAMILIES + "gemma.py",
        "return None if fields.get(key) is None else fields.number(key)",
        "return default if fields.get(key) is None else fields.number(key)",
        "A soft cap that the file switches off by null is on.",
        logits_of("Gemma2, no caps, biases"),
    ),
    Mutant(
        "unknown-field-passes",
        "nanoengine/models/config_fields.py",
        "and value not in OFF",
        "and False",
        "A field of config.json that nobody reads is ignored, though it may change what the model computes.",
        ("tests/models/test_config_fields.py",),
    ),
    Mutant(
        "yarn-amplitude-is-one",
        ROPE,
        "return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0",
        "return 1.0",
        "YaRN does not scale cosines and sines up.",
        logits_of("Llama, rope yarn"),
    ),
    Mutant(
        "head-that-differs-passes",
        LOADER,
        "if twice and not torch.equal(",
        "if False and not torch.equal(",
        "A tied checkpoint with a head of its own is loaded without it.",
        (TEST_LOADER,),
    ),
    Mutant(
        "misshapen-tensor-passes",
        LOADER,
        "elif tuple(header.shape) != tuple(slot.shape) or header.dtype not in FLOATS:",
        "elif header.dtype not in FLOATS:",
        "A tensor of another shape is not refused before weights are loaded.",
        (TEST_LOADER,),
    ),
    Mutant(
        "unexpected-tensor-passes",
        LOADER,
        "                unexpected.append(name)\n",
        "                pass\n",
        "A tensor that the model has no place for is ignored.",
        (TEST_LOADER,),
    ),
    Mutant(
        "index-names-files-anywhere",
        WEIGHTS,
        "if path.parent != folder:",
        "if False:",
        "The index of a model folder can name files outside of it.",
        ("tests/models/test_safetensors_folder.py",),
    ),
)
