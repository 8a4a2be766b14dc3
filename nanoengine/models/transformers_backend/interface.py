"""The attention of a model of transformers, and the visible range of its masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.core.attention import AttentionMetadata, AttentionSpec
from nanoengine.errors import UnsupportedModel

STEP, PROBE = "nanoengine", "nanoengine_probe"
"""Names of the attention in transformers: in steps, without masks, and in a probe, which reads the masks."""

OLDEST = 5, 7
"""The first version of transformers whose modules of experts describe the layout of their weights."""

INSTALL = "pip install 'nanoengine[transformers]'"

COMPUTES_ITSELF = "computes its attention itself, and not by transformers' AttentionInterface"
"""The reason of some refusals."""

WITHOUT_EFFECT = (
    "position_ids use_cache output_attentions output_hidden_states output_router_logits return_dict cache_position input_ids "
    "position_embeddings dropout token_type_ids is_causal sliding_window softcap s_aux num_items_in_batch attention_dropout "
    "layer_idx target_dtype deterministic cache past_key_values per_layer_inputs shared_kv_states training layer_head_mask "
    "logits_to_keep"
)
"""Arguments of attention without effect, or that a probe reads elsewhere."""

MAX_WINDOW = 2**20
"""Limit of the window of a probed mask."""

Visible = tuple[int | None, bool]
"""(window, whether it is a chunk: it begins at multiples of its size); (None, False): every token up to the query."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in a forward pass. The n-th call is the n-th layer of the KV cache, whichever module makes it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    spec: AttentionSpec

    def spec_with(self, window: int | None) -> AttentionSpec:
        return replace(self.spec, window=window, chunked=self.spec.chunked and window is not None)


class AttentionInterface:
    """The current attention function of a model; all its modules refer to it.

    `compute` has the arguments (module, query, key, value, mask, scale, others) with tensors [1, heads, tokens, head_dim], and
    returns [1, tokens, heads, head_dim].
    """

    compute: Callable[[nn.Module, Tensor, Tensor, Tensor, Any, Any, Mapping[str, Any]], Tensor]
    metadata: Sequence[AttentionMetadata] = ()
    """Of a step: of each layer of the KV cache."""
    layer = 0
    """The index of the next layer in a step."""

    def __init__(self, model: Any):
        self.model = model
        for module in model.modules():
            module.__dict__["engine_attention"] = self

    def next_layer(self) -> AttentionMetadata:
        self.layer += 1
        return self.metadata[self.layer - 1]

    def use(self, name: str) -> None:
        """Select the attention of this name in all modules."""
        for module in self.model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation = name


def register() -> Any:
    """Register the attention in the package transformers, and return the package.

    Raises:
        UnsupportedModel: it is not installed, or too old.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedModel(f"it takes transformers: {INSTALL} ({error})") from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise UnsupportedModel(
            f"it takes transformers {'.'.join(map(str, OLDEST))} or newer, and {transformers.__version__} is installed: {INSTALL}"
        )
    transformers.AttentionInterface.register(STEP, _attend)
    transformers.AttentionInterface.register(PROBE, _attend)
    transformers.AttentionMaskInterface.register(PROBE, _mask)
    return transformers


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: Any = None,
    *_: Any,
    **more: Any,
) -> tuple[Tensor, None]:
    return module.engine_attention.compute(module, query, key, value, attention_mask, scaling, more), None


class ProbedMask(torch.Tensor):
    """A mask with its visible range, which selections of queries inherit."""

    visible: Visible | str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        names = ("__getitem__", "to", "expand", "clone", "contiguous", "index_select")
        is_selection = getattr(function, "__name__", "") in names
        if is_selection and isinstance(result, ProbedMask) and hasattr(args[0], "visible"):
            result.visible = args[0].visible
        return result


def _mask(*, q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **_: Any) -> Tensor:
    mask = torch.zeros((1, 1, int(q_length), int(kv_length)), dtype=torch.bool, device="cpu").as_subclass(ProbedMask)
    mask.visible = visible_range(mask_function, local_size)
    return mask


def visible_range(mask_function: Any, size: int | None) -> Visible | str:
    """The visible range of a mask predicate (batch, head, query, key), or a description of another mask. Whole rows are compared,
    of queries around the edges of a window of `size`.
    """
    if size is not None and not 0 < size <= MAX_WINDOW:
        return f"a window of {size}"
    _fill_values(mask_function)
    queries = {0, 1, 5, 63, 4095} if size is None else {0, 1, size - 1, size, size + 1, 2 * size + 1, 3 * size - 1}
    query = torch.tensor(sorted(queries), dtype=torch.int64, device="cpu")[:, None]
    key = torch.arange(int(query.max()) + 3, dtype=torch.int64, device="cpu")[None]
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        visible_keys = torch.broadcast_to(mask_function(zero, zero, query, key), (len(query), key.shape[1])).bool()
    except Exception as error:  # a predicate of any model may raise anything
        return f"a mask that cannot be read ({type(error).__name__})"
    rules: dict[Visible, Tensor] = {(None, False): key <= query}
    if size is not None:
        rules[size, False] = (key <= query) & (key > query - size)
        rules[size, True] = (key <= query) & (key // size == query // size)
    for visible, rule in rules.items():
        if torch.equal(rule, visible_keys):
            return visible
    return "a mask that is neither causal nor a window" + ("" if size is None else f" of {size}")


def _fill_values(function: Any, depth: int = 0) -> None:
    """Fill meta tensors in the closure of a mask with zeros: they describe padding, and there is none."""
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        if isinstance(content, Tensor) and content.is_meta:
            cell.cell_contents = torch.zeros_like(content, device="cpu")
        for inner in content if isinstance(content, tuple | list) else (content,):
            if callable(inner) and depth < 5:
                _fill_values(inner, depth + 1)


def recorded_call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: Any, more: Mapping[str, Any]
) -> AttentionCall:
    """The parameters of a call of attention in a probe.

    Raises:
        UnsupportedModel: no attention backend computes it.
    """
    name = type(module).__name__
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        shapes = f"{list(query.shape)}, {list(key.shape)}"
        raise UnsupportedModel(f"{name} attends to other tokens than those of the text ({shapes})")
    visible: Visible | str = None, False
    if mask is not None:
        visible = getattr(mask, "visible", "a mask that it makes itself")
    elif more.get("is_causal", getattr(module, "is_causal", True)) is False:
        visible = "no mask, and is not causal"
    elif more.get("sliding_window"):
        visible = int(more["sliding_window"]), False
    if isinstance(visible, str):
        raise UnsupportedModel(f"{name} asks for attention with {visible}")
    is_on = {key: value for key, value in more.items() if value is not None and value is not False}
    others = [key for key in is_on if key not in WITHOUT_EFFECT.split()]
    if others:
        raise UnsupportedModel(f"{name} asks for attention with {', '.join(others)}")
    if value.shape[-1] > key.shape[-1]:
        widths = f"values of {value.shape[-1]} numbers, wider than its keys of {key.shape[-1]}"
        raise UnsupportedModel(f"{name} has {widths}")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    spec = AttentionSpec(scale, *visible, more.get("s_aux") is not None, more.get("softcap"))
    return AttentionCall(*sizes, spec)


def values_alone(query: Tensor, value: Tensor) -> Tensor:
    """AttentionInterface of each token to itself only: its value."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()
