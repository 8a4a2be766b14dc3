"""Drawn shapes, rows and weights, which all operations of `contract.py` have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanoengine.kernels.native.operations import NativeKernels
from nanoengine.kernels.operations import Kernels, Weight
from nanoengine.kernels.quantized.tensor import QuantizedTensor
from tests.kernels import formulas
from tests.kernels.formulas import (
    DTYPES,
    ROUNDING,
    SUMMED,
    assert_linear,
    strided,
)
from tests.kernels.quantized_matrices import (
    FORMATS,
    Format,
    assert_rounded,
    drawn,
)

CPU = torch.device("cpu")
EPS = 1e-6
EDGES = (1, 2, 3, 4, 5, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)


@dataclass(frozen=True)
class Kind:
    """What is drawn for an implementation.

    Attributes:
        kernels: of which one is drawn for each case.
        most: rows, inputs and outputs.
        looser: so many times the error that is allowed, in the dtypes that are not float32: Triton's interpreter cuts off
            bfloat16, and torch rounds logits and what is before a gate.
    """

    kernels: Sequence[Kernels]
    most: tuple[int, int, int] = (130, 600, 90)
    dtypes: Sequence[torch.dtype] = tuple(DTYPES)
    formats: Sequence[Format] = tuple(FORMATS)
    looser: int = 1
    device: torch.device = CPU
    edges: Sequence[int] = EDGES

    @property
    def is_native(self) -> bool:
        return isinstance(self.kernels[0], NativeKernels)


class Matrix(NamedTuple):
    weight: Weight
    sources: list[Tensor | QuantizedTensor]
    form: Format | None

    def parts(self) -> list[tuple[slice, Tensor | QuantizedTensor]]:
        """The outputs of each part."""
        firsts = [sum(source.shape[0] for source in self.sources[:i]) for i in range(len(self.sources))]
        return [(slice(i, i + source.shape[0]), source) for i, source in zip(firsts, self.sources, strict=True)]


Made = tuple[Tensor, ...]
Operation = tuple[Callable[[Tensor], Made], Callable[..., None]]
"""What makes something of some rows, given as indices; and what asserts that all rows together became what they should."""


class Case:
    """What the operations of one case have in common.

    Attributes:
        x: [rows, inputs].
    """

    def __init__(self, kind: Kind, seed: int):
        self.kind, self.seed, self.rng = kind, 100 * seed, random.Random(seed)
        self.dtype, self.kernels = self.rng.choice(kind.dtypes), self.rng.choice(kind.kernels)
        self.looser = 1 if self.dtype is torch.float32 else kind.looser
        activations = getattr(self.kernels, "activation_dtype", "")
        self.parts, self.halves = {"int8": 1, "int16": 2}.get(activations, 0), activations == "bfloat16"
        self.rounds = self.parts > 0 or self.halves
        self.rows, self.inputs, self.outputs = map(self.size, kind.most)
        self.x = self.numbers(self.rows, self.inputs)

    def size(self, most: int) -> int:
        return min(most, self.rng.choice([self.rng.choice(self.kind.edges), self.rng.randint(1, most)]))

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.seed += 1
        return formulas.random(*shape, dtype=dtype or self.dtype, seed=self.seed).to(self.kind.device)

    def somehow(self, x: Tensor) -> Tensor:
        """The same numbers, perhaps with gaps between them; for other kernels than native ones, between rows alone."""
        if self.rng.random() > 0.2 or (x.dim() == 1 and not self.kind.is_native):
            return x
        return strided(x) if self.kind.is_native else torch.cat((x, x), -1)[..., : x.shape[-1]]

    def maybe(self, x: Tensor) -> Tensor | None:
        return self.rng.choice([None, x])

    def matrix(self, *outputs: int) -> Matrix:
        """Of so many parts: numbers, or quantized, of which the first may be numbers; then inputs are a multiple of the unit."""
        form = None if not self.kind.formats or self.rng.random() < 0.4 else self.rng.choice(self.kind.formats)
        if form:
            self.inputs = max(form.unit, self.inputs // form.unit * form.unit)
            self.x = self.numbers(self.rows, self.inputs) / 8
        among = len(outputs) > 1 and self.rng.random() < 0.3
        sources = [
            self.numbers(count, self.inputs)
            if form is None or (among and not i)
            else drawn(form, count, self.inputs, i)
            for i, count in enumerate(outputs)
        ]
        return self.filled(sources, form)

    def filled(
        self, sources: list[Tensor | QuantizedTensor], form: Format | None, dtype: torch.dtype | None = None
    ) -> Matrix:
        """The parts are filled in any order."""
        weight = self.kernels.new_weight(
            sum(x.shape[0] for x in sources), self.inputs, dtype or self.dtype, self.kind.device
        )
        matrix = Matrix(weight, sources, form)
        for rows, source in self.rng.sample(matrix.parts(), len(sources)):
            place = weight.rows(rows.start, source.shape[0])
            assert place.shape == source.shape
            place.copy_(self.somehow(source)) if isinstance(source, Tensor) else place.copy_quantized(source)
        return matrix

    def dense(self, source: Tensor | QuantizedTensor) -> Tensor:
        """What products are made of: native kernels do not round what is quantized, but with activations in bfloat16."""
        if isinstance(source, Tensor):
            return source
        values = source.dequantize(torch.float32 if self.kind.is_native else self.dtype).to(self.kind.device)
        return values.bfloat16() if self.halves else values

    def check_product(self, out: Tensor, x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> None:
        for rows, source in matrix.parts():
            part = None if bias is None else bias[rows]
            if self.rounds and not isinstance(source, Tensor):
                assert bias is None
                if self.parts:
                    assert_rounded(out[:, rows], x, source, self.parts)
                else:
                    assert_linear(out[:, rows], x, self.dense(source), None, blur=self.blur)
            else:
                assert_linear(out[:, rows], x, self.dense(source), part, self.looser)

    @property
    def blur(self) -> float:
        """So many times the error of a sum, for activations of float32 that may become bfloat16."""
        return 1 + 1.1 * ROUNDING[torch.bfloat16] / SUMMED * (self.dtype is torch.float32)

    def check_near(self, found: Tensor, expected: Tensor) -> None:
        """To the bit where the dtype is rounded to."""
        if self.looser == 1:
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0)
