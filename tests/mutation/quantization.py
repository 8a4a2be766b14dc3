"""Mutants of quantization: as weights are loaded, and as folders have it."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

AT_LOAD = "nanoengine/models/quantization/at_load.py"
LAYOUTS = "nanoengine/models/quantization/layouts.py"
SCHEME = "nanoengine/models/quantization/scheme.py"
TENSOR = "nanoengine/kernels/quantized/tensor.py"
TEST_AT_LOAD = "tests/models/quantization/test_at_load.py"
TEST_LAYOUTS = "tests/models/quantization/test_layouts.py"
TEST_FOLDER = "tests/models/quantization/test_packed_folder.py"

MUTANTS = (
    Mutant(
        "int8-scale-is-too-small",
        AT_LOAD,
        "scales[rows] = part.abs().amax(1, keepdim=True) / 127",
        "scales[rows] = part.abs().amax(1, keepdim=True) / 128",
        "The largest number of a row does not fit into 8 bits, and turns to the other sign.",
        (TEST_AT_LOAD,),
    ),
    Mutant(
        "int4-range-leaves-zero-out",
        AT_LOAD,
        "low, high = grouped.amin(2, keepdim=True).clamp_(max=0), grouped.amax(2, keepdim=True).clamp_(min=0)",
        "low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)",
        "A group of numbers of one sign has no code for zero, and its zero point leaves the range.",
        (TEST_AT_LOAD,),
    ),
    Mutant(
        "worst-range-is-chosen",
        AT_LOAD,
        "is_better = other < error",
        "is_better = other > error",
        "Of several ranges for a group, that of the largest error is taken.",
        (TEST_AT_LOAD,),
    ),
    Mutant(
        "infinite-weight-is-quantized",
        AT_LOAD,
        "not values.sum().isfinite() and not values.isfinite().all()",
        "False",
        "A weight with numbers that are not finite is quantized without a word.",
        (TEST_AT_LOAD,),
    ),
    Mutant(
        "zero-points-are-forgotten",
        TENSOR,
        "zeros = 1 << self.bits - 1 if self.zeros is None else self.zeros[:, :, None].float()",
        "zeros = 1 << self.bits - 1",
        "Zero points of groups are ignored.",
        ("tests/kernels/quantized/test_tensor.py",),
    ),
    Mutant(
        "rows-leave-their-scales",
        TENSOR,
        "return Grouped(self.numbers[rows], self.scales[rows], zeros, self.bits)",
        "return Grouped(self.numbers[rows], self.scales[: len(rows)], zeros, self.bits)",
        "Rows that change their order leave their scales behind.",
        ("tests/kernels/quantized/test_tensor.py",),
    ),
    Mutant(
        "awq-order-is-plain",
        LAYOUTS,
        "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        "AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)",
        "Outputs in a word of AWQ are taken in their plain order.",
        (TEST_LAYOUTS,),
    ),
    Mutant(
        "nibbles-are-swapped",
        LAYOUTS,
        "pairs |= pairs << 4",
        "pairs = (pairs << 8) | (pairs >> 4)",
        "Of two numbers of 4 bits in a byte, the upper one comes first.",
        (TEST_LAYOUTS,),
    ),
    Mutant(
        "gptq-zero-points-lack-one",
        SCHEME,
        'zeros_less_one=stored == "gptq"',
        "zeros_less_one=False",
        "Zero points of old GPTQ files are taken as they are stored, one too low.",
        ("tests/models/quantization/test_scheme.py", TEST_FOLDER),
    ),
    Mutant(
        "reordered-inputs-pass",
        LAYOUTS,
        'if suffix.endswith("g_idx") and not torch.equal(tensor.long(), own):',
        "if False:",
        "A checkpoint whose inputs are grouped in an order of their own is computed as if they were not.",
        (TEST_LAYOUTS, TEST_FOLDER),
    ),
    Mutant(
        "block-scales-go-by-columns",
        LAYOUTS,
        "rows, columns = self.block\n",
        "columns, rows = self.block\n",
        "Rows and columns of the blocks that share a scale are swapped.",
        (TEST_LAYOUTS, TEST_FOLDER),
    ),
    Mutant(
        "odd-zero-points-of-a-symmetric-file-pass",
        LAYOUTS,
        'if "qzeros" in early and bool((self._zeros(early["qzeros"], shape[0]) != middle).any()):',
        "if False:",
        "A file that says it is symmetric and has other zero points is not refused.",
        (TEST_LAYOUTS, TEST_FOLDER),
    ),
    Mutant(
        "unknown-quantization-field-passes",
        SCHEME,
        "    scheme = METHODS[method](fields)\n    fields.refuse_others()\n",
        "    scheme = METHODS[method](fields)\n",
        "A field of the quantization_config that nobody reads is ignored.",
        ("tests/models/quantization/test_scheme.py",),
    ),
)
