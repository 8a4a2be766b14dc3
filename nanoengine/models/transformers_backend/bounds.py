"""Limits of a config.json, which determines the sizes of the modules that transformers builds."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from nanoengine.errors import NanoEngineError, UnsupportedModel, shown
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.config_fields import OFF, ConfigFields
from nanoengine.models.quantization.scheme import QUANTIZATION

REFUSED = {
    "compression_config": "the weights are as compressed-tensors wrote them long ago, under another name",
    "fusion_config": "it names modules that transformers would exchange",
    "kernel_config": "it names kernels that transformers would fetch and run",
    "use_kernels": "it lets transformers fetch and run kernels",
    "transformers_weights": "it names another file of weights",
}
"""Fields that would make transformers load other code or files."""

MAX_INTEGER = 2**24
"""Limit of a field that may be a size; lists of as many entries are small."""

LARGE = re.compile(r"theta|base|token|_id|version|seed")
"""Parts of names of fields that are not sizes."""

SPARE = 128
"""Limit of the layers and modules of a config beyond the number of tensors in its files."""

MAX_SPARE_NUMBERS = 2**25
"""Limit of a computed tensor, beyond the stored weights."""

MAX_VALUES = 2**16
"""Limit of the values in a config.json: transformers copies it many times."""

LEFT_OUT = re.compile(
    r"_.*|auto_map|attribute_map|.*_implementation|name_or_path|num_labels|id2label|label2id|sub_configs.*|base_model_.*"
)
"""Fields of code or labels, or that would override the classes of transformers."""


def checked(table: Mapping[str, Any], num_tensors: int) -> dict[str, Any]:
    """A copy of a config.json, nested tables included, without the fields of `LEFT_OUT`.

    Raises:
        UnsupportedModel: other code, or sizes that do not match its weights; the message names field and value.
    """
    fields, counter = ConfigFields(table), itertools.count(1)

    def copied(key: str, value: Any) -> Any:
        if next(counter) > MAX_VALUES:
            raise UnsupportedModel(f"config.json has more than {MAX_VALUES} values")
        if key in REFUSED and value not in OFF:
            raise fields.wrong(key, value, f"{REFUSED[key]}; the transformers backend does not support it")
        if isinstance(value, Mapping):
            return {name: copied(name, inner) for name, inner in value.items() if not LEFT_OUT.fullmatch(name)}
        if isinstance(value, list):
            return [copied(key, inner) for inner in value]
        most = num_tensors + SPARE if key.rstrip("s").endswith("layer") else MAX_INTEGER
        if isinstance(value, int) and value > most and not LARGE.search(key):
            why = f"it must be at most {most}, as the files have {num_tensors} tensors"
            raise fields.wrong(shown(key).strip("'"), value, why)
        return value

    left_out = {*REFUSED, QUANTIZATION}  # dequantized weights are loaded
    return {name: value for name, value in copied("", table).items() if name not in left_out}


@contextmanager
def named(kind: type[NanoEngineError], message: str) -> Iterator[None]:
    """Convert exceptions of transformers to an error of this kind, in one line that starts with `message`."""
    try:
        yield
    except NanoEngineError:
        raise
    except Exception as error:
        raise kind(f"{message}: {type(error).__name__}: {shown(' '.join(str(error).split()))}") from error


@contextmanager
def bounded_by(headers: Sequence[TensorHeader]) -> Iterator[None]:
    """Limit the parameters, buffers and modules that are built, and the tensors that are computed, by the weights in the files.

    Raises:
        UnsupportedModel: more than that, with a margin for tied weights and fused tensors.
    """
    stored = sum(math.prod(header.shape) for header in headers)
    most = {"numbers": 2 * stored + 2**20, "buffers": 2 * stored + 2**28, "parts": 16 * len(headers) + 16 * SPARE}
    hold = f"the files hold {stored} numbers in {len(headers)} tensors: correct the sizes in config.json"
    built = dict.fromkeys(most, 0)
    thread = threading.get_ident()

    def count(kind: str, number: int) -> None:
        if threading.get_ident() == thread:
            built[kind] += number
            if built[kind] > most[kind]:
                raise UnsupportedModel(f"config.json asks for a model of more than {most[kind]} {kind}, and {hold}")

    class OfTensors(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.numel() > MAX_SPARE_NUMBERS + 4 * stored:
                raise UnsupportedModel(f"config.json asks for a tensor {list(result.shape)}, and {hold}")
            return result

    def counting(kind: str) -> Callable[[Any, str, Any], None]:
        return lambda *args: count(kind, args[2].numel() if isinstance(args[2], Tensor) else 1)

    with OfTensors(), ExitStack() as hooks:
        for kind, register in (
            ("numbers", torch_module.register_module_parameter_registration_hook),
            ("buffers", torch_module.register_module_buffer_registration_hook),
            ("parts", torch_module.register_module_module_registration_hook),
        ):
            hooks.callback(register(counting(kind)).remove)
        yield
