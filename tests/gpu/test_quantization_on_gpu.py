"""Quantized weights on a GPU: floats of 8 bits stay near the model, and recorded products are what they are at once."""

from __future__ import annotations

import pytest
import torch

from nanoengine.errors import InvalidConfig
from nanoengine.kernels.triton.launch import float8_unsupported_reason
from nanoengine.kernels.triton.operations import TritonKernels
from nanoengine.models.quantization.at_load import quantizer
from tests.gpu.marks import needs_gpu
from tests.gpu.test_demo_on_gpu import ON_GPU, greedy

pytestmark = needs_gpu


def test_floats_of_8_bits_stay_near_the_model_or_say_why_they_cannot() -> None:
    if float8_unsupported_reason(torch.device("cuda")) is not None:
        with pytest.raises(InvalidConfig, match="int8"):
            greedy(**ON_GPU, quantization="fp8")
        return
    first = []
    for options in ({"quantization": "fp8"}, {}):
        logprobs = [output.outputs[0].logprobs for output in greedy(1, **ON_GPU, **options)]
        first.append([max(entry.logprob for entry in found[0].values()) for found in logprobs if found])
    assert first[0] != first[1], "the weights are rounded"
    torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(first[1]), atol=0.5, rtol=0.0)


@pytest.mark.parametrize("name", ["int8", "int4", "int4-128", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 16, 200])
def test_recorded_products_are_those_that_are_not(name: str, num_rows: int) -> None:
    if name == "fp8" and (reason := float8_unsupported_reason(torch.device("cuda"))) is not None:
        pytest.skip(reason)
    kernels, device = TritonKernels(), torch.device("cuda")
    weight = kernels.new_weight(512, 256, torch.bfloat16, device)
    weight.rows(0, 512).copy_quantized(quantizer(name)(torch.randn(512, 256) / 16))
    x, ids = torch.randn(num_rows, 256).bfloat16().to(device), torch.arange(num_rows, device=device)

    def computed() -> tuple[torch.Tensor, ...]:
        return kernels.linear(x, weight, None), kernels.logits(x, weight), kernels.embed(ids, weight)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        computed()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = computed()
    for _ in range(2):
        x.copy_(torch.randn(num_rows, 256))
        graph.replay()
        for found, expected in zip(recorded, computed(), strict=True):
            assert torch.equal(found, expected)
