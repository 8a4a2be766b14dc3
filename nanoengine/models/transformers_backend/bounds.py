"""Bounds of a config.json, which decides the size of everything that transformers builds from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules import module as torch_module

from nanoengine.errors import UnsupportedModel
from nanoengine.models.checkpoint import TensorHeader
from nanoengine.models.config_fields import OFF, ConfigFields

REFUSED = {
    "quantization_config": "weights that are quantized in the files are read for the families of this package alone",
    "compression_config": "weights that are quantized in the files are read for the families of this package alone",
    "fusion_config": "it names modules that transformers would exchange",
    "kernel_config": "it names kernels that transformers would fetch and run",
    "use_kernels": "it lets transformers fetch and run kernels",
    "transformers_weights": "it names another file of weights",
}
"""Fields with which a config.json would make transformers load something else than its own modules."""

MAX_INTEGER = 2**24
"""Of a field that may be a size; lists of so many entries are still small."""

LARGE = ("theta", "base", "token", "_id", "version", "seed")
"""Parts of the names of fields that are no sizes."""

SPARE = 1024
"""How many more layers, and modules, a config may ask for than its files have tensors."""


def check_fields(table: Mapping[str, Any], num_tensors: int) -> None:
    """Refuse a config.json, nested tables included, that runs other code or has sizes which its weights cannot have.

    Raises:
        UnsupportedModel: the message names the field, its value and the limit.
    """
    fields, pending = ConfigFields(table), [table]
    while pending:
        for key, value in pending.pop().items():
            if key in REFUSED and value not in OFF:
                raise fields.wrong(key, value, f"{REFUSED[key]}; the transformers backend does not take it")
            if key.endswith("implementation") and isinstance(value, str) and "/" in value:
                raise fields.wrong(key, value, "kernels are not fetched from a hub: remove the field")
            if isinstance(value, Mapping):
                pending.append(value)
            most = num_tensors + SPARE if key.rstrip("s").endswith("layer") else MAX_INTEGER
            numbers = value if isinstance(value, list) else [value]
            for number in numbers:
                if isinstance(number, int) and number > most and not any(part in key for part in LARGE):
                    raise fields.wrong(
                        key, number, f"it must be at most {most}, as the files have {num_tensors} tensors"
                    )


@contextmanager
def bounded_by(headers: Sequence[TensorHeader]) -> Iterator[None]:
    """Modules that are built meanwhile have at most about as many parameters, numbers and parts as the weights in the files.

    Raises:
        UnsupportedModel: as soon as there are more; tied weights and fused tensors are allowed for.
    """
    stored = sum(math.prod(header.shape) for header in headers)
    most = {"numbers": 2 * stored + 2**20, "buffers": 2 * stored + 2**28, "parts": 16 * len(headers) + 16 * SPARE}
    built = dict.fromkeys(most, 0)
    thread = threading.get_ident()

    def count(kind: str, number: int) -> None:
        if threading.get_ident() == thread:
            built[kind] += number
            if built[kind] > most[kind]:
                raise UnsupportedModel(
                    f"config.json asks for a model of more than {most[kind]} {kind}, and the files hold {stored} numbers in "
                    f"{len(headers)} tensors: correct the sizes in config.json"
                )

    def counting(kind: str) -> Callable[[Any, str, Any], None]:
        return lambda *given: count(kind, given[2].numel() if isinstance(given[2], Tensor) else 1)

    with ExitStack() as hooks:
        for kind, register in (
            ("numbers", torch_module.register_module_parameter_registration_hook),
            ("buffers", torch_module.register_module_buffer_registration_hook),
            ("parts", torch_module.register_module_module_registration_hook),
        ):
            hooks.callback(register(counting(kind)).remove)
        yield
