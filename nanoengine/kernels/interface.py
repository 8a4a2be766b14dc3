"""Kernels: the operations that layers are made of, behind one protocol, and how an implementation is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from nanoengine.errors import InvalidConfig
from nanoengine.kernels.sampling import SamplingTable
from nanoengine.quantization.tensor import QuantizedTensor


class Destination(Protocol):
    """Where a tensor of a checkpoint goes: a tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    def copy_(self, source: Tensor, /) -> object: ...


@runtime_checkable
class QuantizedDestination(Destination, Protocol):
    """A place that takes quantized rows as they are; those that kernels would rather have as numbers, it dequantizes.

    All rows of a weight need not be of one format: of qkv_proj, v often has more bits than q and k.
    """

    def copy_quantized(self, source: QuantizedTensor, /) -> None: ...


class Weight(Protocol):
    """A matrix [outputs, inputs] in whatever order its kernels read it."""

    @property
    def shape(self) -> torch.Size: ...

    def formats(self) -> Mapping[str, int]:
        """Bytes that it takes, by the name of the format that they are in."""
        ...

    def rows(self, first: int, count: int) -> QuantizedDestination:
        """Rows [first, first + count), to be filled from a checkpoint."""
        ...


class ExpertWeights(Protocol):
    """A matrix [outputs, inputs] for each expert, in whatever order its kernels read them."""

    @property
    def shape(self) -> torch.Size:
        """(experts, outputs, inputs)"""
        ...

    def formats(self) -> Mapping[str, int]:
        """As of a `Weight`."""
        ...

    def expert(self, index: int) -> QuantizedDestination:
        """The matrix of one expert, to be filled from a checkpoint."""
        ...


class ExpertBiases(NamedTuple):
    """What is added to the three products of each expert, float32."""

    gate: Tensor  # [experts, size]
    up: Tensor  # [experts, size]
    down: Tensor  # [experts, hidden]


class PlacedTokens(NamedTuple):
    """The new tokens of a step, and where they stand."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_groups, num_tokens] int64: a slot in each KV group; -1: nowhere
    seq_lens: Tensor  # [num_seqs] int32: with the new tokens


class Kernels(Protocol):
    """One implementation. Rows are tokens; every result has the dtype of its input unless said otherwise."""

    name: str
    description: str
    quantized_products: str
    """How quantized weights are multiplied, for the start-up line."""
    fingerprint: str
    """Of the code that computes: K/V that other code has computed may have other bits."""
    capturable: bool
    """Whether a CUDA graph can record them: they never wait for the device, and launch the same whatever it holds."""

    def new_weight(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Weight:
        """A matrix with unset rows."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [num_tokens, inputs] -> [num_tokens, outputs]."""
        ...

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        """hidden W^T in float32: [num_tokens, inputs] -> [num_tokens, outputs]."""
        ...

    def embed(self, token_ids: Tensor, weight: Weight) -> Tensor:
        """Rows of a weight: [num_tokens] -> [num_tokens, inputs]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, computed in float32; weights of norms are float32, here and below."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the residual that is given may be overwritten."""
        ...

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """GATES[activation](first half of each row, second half) (`gates.py`): [num_tokens, 2 * width] -> [num_tokens, width]."""
        ...

    def gated_linear(self, x: Tensor, weight: Weight, activation: str = "silu") -> Tensor:
        """GATES[activation](x G^T, x U^T) (`gates.py`), where the rows of the weight are G and then U: [num_tokens, inputs] ->
        [num_tokens, outputs / 2]."""
        ...

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual) W^T + bias, x + residual), or (rms_norm(x) W^T + bias, x) without a residual; the one that is
        given may be overwritten. `norm` is the weight of the norm."""
        ...

    def norm_gated_linear(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Weight, activation: str = "silu"
    ) -> tuple[Tensor, Tensor]:
        """The same with `gated_linear` in place of the product."""
        ...

    def new_experts(
        self, experts: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        """A matrix with unset rows for each expert."""
        ...

    def experts(
        self,
        x: Tensor,
        gate: ExpertWeights,
        up: ExpertWeights,
        down: ExpertWeights,
        chosen: Tensor,
        factors: Tensor,
        activation: str = "silu",
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        """A mixture of experts: sum over j of factors[i, j] * (D_e GATES[activation](G_e x_i, U_e x_i)), where e = chosen[i, j].

        The sum is float32, and rounded once. It is added up in an order that no other row of x changes; a row that is not finite
        spoils no other.

        Args:
            x: [num_tokens, hidden].
            gate, up: matrices [size, hidden].
            down: matrices [hidden, size].
            chosen: [num_tokens, k] int64, the experts of each token, which must exist and differ.
            factors: [num_tokens, k] float32.
            activation: one of `gates.py`.
            biases: of the three products.

        Returns:
            [num_tokens, hidden].
        """
        ...

    def place_tokens(
        self,
        token_ids: Tensor,
        rows: Tensor,
        query_start_loc: Tensor,
        num_computed: Tensor,
        last_tokens: Tensor,
        tables: Tensor,
        block_size: int,
        max_query_len: int,
    ) -> PlacedTokens:
        """Where the new tokens of a step stand: slot = table[position // block_size] * block_size + position % block_size.

        The last row of `last_tokens`, and of each group of `tables`, is the padding row: sequences in it have length 0, and
        stand in no slot.

        Args:
            token_ids: [num_tokens] int32; -1 stands for the last token of the sequence's row.
            rows: [num_seqs] int32, where each sequence's last token and block table are kept.
            query_start_loc: [num_seqs + 1] int32, where the tokens of each sequence begin.
            num_computed: [num_seqs] int32, tokens before them.
            last_tokens: [num_rows] int64.
            tables: [num_groups, num_rows, width] int32: the block tables of each KV group.
            max_query_len: most new tokens of a sequence.
        """
        ...

    def choose_tokens(
        self, logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, last_tokens: Tensor | None = None
    ) -> Tensor:
        """One token for each row of logits: the highest, or for a temperature above 0 a draw by the Gumbel-max trick from
        what the filters leave, in their order: top_k, top_p, min_p. A draw depends on the row's logits, seed and position alone.

        Args:
            logits: [n, vocab_size] float32; left as they are.
            rows: [n] int32: which row of the table each is for.
            positions: [n] int32 or int64, where in its sequence each token will stand.
            last_tokens: [num_rows] int64: if given, each token is written into its row, too.

        Returns:
            [n] int64; where there is no finite highest logit `NOT_FINITE`, or `NONE_LEFT` if all are -inf. NaN is the highest.
        """
        ...


def choose_kernels(
    name: str, device: torch.device, dtype: torch.dtype, *, exact: bool = False, use_tqdm: bool = False
) -> Kernels:
    """The kernels of that name; for "auto" those made for the device if they can run here, and torch's otherwise.

    Args:
        exact: do not round activations where they meet quantized weights.
        use_tqdm: show when they have to be compiled first.

    Raises:
        InvalidConfig: kernels were asked for by name, and cannot run here; the message says why.
    """
    from nanoengine.kernels import native_operations
    from nanoengine.kernels.native_kernels import NativeKernels
    from nanoengine.kernels.torch_kernels import TorchKernels
    from nanoengine.kernels.triton import launch

    made_for_it = "triton" if device.type == "cuda" else "native"
    wanted = made_for_it if name == "auto" else name
    reason = None
    if wanted == "native":
        reason = native_operations.unsupported_reason(device, dtype, use_tqdm=use_tqdm)
    elif wanted == "triton":
        reason = launch.unsupported_reason(device)
    if reason is not None and name != "auto":
        raise InvalidConfig(f"kernels is {name!r}, but they cannot run here: {reason}")
    if wanted == "torch" or reason is not None:
        return TorchKernels(reason and f"no {wanted} ones: {reason}")
    if wanted == "native":
        return NativeKernels(exact=exact)
    from nanoengine.kernels.triton_kernels import TritonKernels  # only now: the package triton need not be there

    return TritonKernels()
