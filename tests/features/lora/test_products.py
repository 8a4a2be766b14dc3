"""AdaptedProducts: rows without an adapter have the bits that the kernels give them, rows with one those that they have alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoengine.features.lora.adapted_products import AdaptedProducts, AdapterRows
from nanoengine.features.lora.layer_map import LinearLayer
from nanoengine.features.lora.native_products import NativeAdaptedProducts
from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Kernels, Norm, Weight
from nanoengine.kernels.reference.gates import ACTIVATIONS, GATES
from nanoengine.kernels.reference.operations import TorchKernels
from tests.features.lora.written import adapter_of
from tests.kernels.contract_cases import CPU, EPS, Case, Kind
from tests.kernels.marks import needs_kernels
from tests.support import threads

NUM_ADAPTERS = 5


@dataclass
class Drawn:
    """A matrix, and adapters of some of its parts."""

    case: Case
    weight: Weight
    layers: dict[str, LinearLayer]
    adapters: list[dict[str, tuple[Tensor, Tensor, float]]]
    slots: np.ndarray  # of each row; -1: none

    def products(self) -> AdaptedProducts:
        kernels = self.case.kernels
        if isinstance(kernels, NativeKernels):
            limits = {"max_adapters": NUM_ADAPTERS, "max_rows": self.case.rows}
            return NativeAdaptedProducts(kernels, [self.weight], self.layers, **limits)
        return AdaptedProducts(kernels, [self.weight], self.layers, CPU)

    def delta(self, x: Tensor) -> Tensor:
        """What the adapters add, in float64."""
        total = torch.zeros(len(x), self.weight.shape[0], dtype=torch.float64)
        for row, slot in enumerate(self.slots):
            for name, (a, b, scale) in self.adapters[slot].items() if slot >= 0 else ():
                layer = self.layers[name]
                added = scale * (b.double()[layer.order] @ (a.double() @ x[row].double()))
                total[row, layer.first : layer.first + layer.count] += added
        return total


def draw(case: Case, outputs: Sequence[int]) -> Drawn:
    """Parts with and without adapters, of ranks at the edges of what kernels cut."""
    rng, matrix = case.rng, case.matrix(*outputs)
    inputs, dtype = case.inputs, rng.choice([torch.float32, torch.bfloat16, torch.float16])
    firsts = np.cumsum([0, *outputs]).tolist()
    layers = {
        str(i): LinearLayer(
            0, first, count, inputs, torch.randperm(count) if rng.random() < 0.3 else torch.arange(count)
        )
        for i, (first, count) in enumerate(zip(firsts, outputs, strict=False))
    }
    adapters = []
    for _ in range(NUM_ADAPTERS):
        rank = rng.choice([1, 2, 3, 4, 7, 8, 9, 16, 17])
        chosen = [name for name in layers if rng.random() < 0.8]
        parts = {name: (case.numbers(rank, inputs), case.numbers(layers[name].count, rank)) for name in chosen}
        adapters.append({name: (a.to(dtype), b.to(dtype), rng.choice([0.5, 1.7])) for name, (a, b) in parts.items()})
    most = rng.choice([0, 1, 2, NUM_ADAPTERS - 1])
    slots = np.array([rng.randint(-1, most) if rng.random() < 0.7 else -1 for _ in range(case.rows)])
    return Drawn(case, matrix.weight, layers, adapters, slots)


def groups_of(slots: np.ndarray) -> list[AdapterRows]:
    return [AdapterRows(int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(slots) if slot >= 0]


def kind_of(kernels: Sequence[Kernels]) -> Kind:
    formats = () if isinstance(kernels[0], TorchKernels) else Kind.formats
    return Kind(kernels, formats=formats, dtypes=(torch.float32, torch.bfloat16))


@pytest.fixture(scope="module")
def native() -> Kind:
    kinds = ("int8", "int16", "bfloat16", "float32")
    return kind_of([NativeKernels(activation_dtype=kind) for kind in kinds])


def check(kind: Kind, seed: int) -> None:
    """A drawn product of kernels, from sums in float64."""
    case = Case(kind, seed)
    rng, half, every = case.rng, case.outputs, torch.arange(case.rows)
    drawn = draw(case, rng.choice([(half, half), (2 * half,), (half, 2 * half, half)]))
    activation = rng.choice([None, *ACTIVATIONS])
    norm = Norm(1 + case.numbers(case.inputs, dtype=torch.float32) / 4, EPS) if rng.random() < 0.5 else None
    residual = None if norm is None else case.maybe(case.numbers(*case.x.shape) / 8)
    bias = None if activation is not None else case.maybe(case.numbers(drawn.weight.shape[0]))

    def call(rows: Tensor) -> Tensor:
        x, before = case.x[rows], None if residual is None else residual[rows]
        options = {"norm": norm, "residual": None if before is None else before.clone(), "activation": activation}
        out, total = case.kernels.product(x.clone(), drawn.weight, bias, **options)
        assert torch.equal(total.nan_to_num(), (x if before is None else x + before).nan_to_num())
        return out

    x = case.x if residual is None else case.x + residual
    x = x if norm is None else case.kernels.rms_norm(x, norm.weight, EPS)
    right = case.kernels.logits(x, drawn.weight).double() + drawn.delta(x)
    right = right if bias is None else right + bias.double()
    right = right if activation is None else GATES[activation](*right.chunk(2, 1))
    plain, products = call(every), drawn.products()
    for slot, parts in enumerate(drawn.adapters):
        products.put(slot, adapter_of(parts))
    products.install()
    try:
        products.begin([])
        assert torch.equal(call(every), plain), "no row has an adapter"
        products.begin(groups_of(drawn.slots))
        found, base = call(every), torch.from_numpy(drawn.slots < 0)
        tolerance = 1e-4 if case.dtype is torch.float32 else 0.04  # activations may have 8 bits
        assert ((found.double() - right).norm(dim=1) <= tolerance * right.norm(dim=1) + tolerance).all()
        if kind.is_native:
            assert torch.equal(found[base], plain[base]), "rows without adapters are what they were"
            with threads(2):
                assert torch.equal(call(every), found)
            check_alone(drawn, products, call, found)
    finally:
        vars(case.kernels).pop("product", None)


def check_alone(drawn: Drawn, products: AdaptedProducts, call: Callable[[Tensor], Tensor], found: Tensor) -> None:
    """Some rows by themselves, and all beside a row that is not finite."""
    case = drawn.case
    some = torch.tensor(case.rng.sample(range(case.rows), case.rng.randint(1, min(case.rows, 9))))
    products.begin(groups_of(drawn.slots[some.numpy()]))
    assert torch.equal(call(some), found[some])
    spoilt = case.rng.randrange(case.rows)
    case.x[spoilt, 0] = torch.nan
    products.begin(groups_of(drawn.slots))
    every = torch.arange(case.rows)
    assert torch.equal(call(every)[every != spoilt], found[every != spoilt])


@needs_kernels
@pytest.mark.parametrize("part", range(4))
def test_native_rows_have_the_bits_that_they_have_without_others(native: Kind, part: int) -> None:
    for seed in range(25 * part, 25 * (part + 1)):
        try:
            check(native, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_torch_computes_the_same_formula() -> None:
    for seed in range(30):
        check(kind_of([TorchKernels()]), seed)


@needs_kernels
def test_an_adapter_that_was_dropped_adds_nothing(native: Kind) -> None:
    case = Case(native, 3)
    drawn = draw(case, [33])
    products, x = drawn.products(), case.x
    plain = case.kernels.linear(x, drawn.weight, None)
    a, b = case.numbers(4, case.inputs), case.numbers(33, 4)
    products.put(1, adapter_of({"0": (a, b, 1.0)}))
    products.begin([AdapterRows(1, np.arange(case.rows))])
    assert not torch.equal(products.product(x, drawn.weight)[0], plain)
    products.drop(1)
    assert torch.equal(products.product(x, drawn.weight)[0], plain)
