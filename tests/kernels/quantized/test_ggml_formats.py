"""Names and sizes of block formats."""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nanoengine.kernels.quantized.ggml_formats import FORMATS, OTHER_TYPES


def test_formats_are_those_of_ggml() -> None:
    for number, kind in FORMATS.items():
        known = GGMLQuantizationType(number)
        assert (kind.name, (kind.values, kind.nbytes)) == (known.name, GGML_QUANT_SIZES[known])
    assert all(GGMLQuantizationType(number).name == name for number, name in OTHER_TYPES.items())
    assert not FORMATS.keys() & OTHER_TYPES.keys()
