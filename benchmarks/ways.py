"""Other ways to answer the same requests on one engine: beside busy processes, under a grammar, with adapters."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.drive import NO_PARAMS, Adapt
from benchmarks.figures import Figures
from benchmarks.neighbours import Neighbours, fair_share
from benchmarks.options import positive_int
from benchmarks.report import ENGINE
from benchmarks.session import Session
from nanoengine import LLM, LoRARequest
from nanoengine.core.sequence import Request
from nanoengine.features.lora.layer_map import find_linear_layers

RANK = 16
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["administrator", "developer", "visitor"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "tags", "active"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": RECORD, "minItems": 500}
"""No text ends before 4,000 tokens: each record has more than 8."""


class Way(NamedTuple):
    """One way.

    Attributes:
        params: sampling parameters of every request.
        adapt: gives requests their adapters.
        around: in which they are answered.
        beside: busy processes meanwhile.
    """

    name: str = ENGINE
    params: Mapping[str, Any] = NO_PARAMS
    adapt: Adapt | None = None
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    beside: int = 0

    def more(self, times_as_fast: float) -> Figures:
        """`fair_share`: what the engine made of the share of the CPUs that is left if all who want one get the same."""
        return {"fair_share": times_as_fast / fair_share(torch.get_num_threads(), self.beside)} if self.beside else {}


def add_way_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other ways, turn by turn with the plain one")
    group.add_argument("--beside", type=positive_int, metavar="N", help="beside N busy processes")
    group.add_argument(
        "--grammar", action="store_true", help="under a JSON schema, with forced tokens as drafts and token by token"
    )
    group.add_argument(
        "--adapters",
        type=positive_int,
        nargs="+",
        default=[],
        metavar="N",
        help=f"with N random adapters of rank {RANK} over the requests (they need --option enable_lora=True)",
    )


@contextmanager
def ways_of(args: argparse.Namespace, session: Session) -> Iterator[list[Way]]:
    """The plain way first."""
    ways = [Way()]
    with ExitStack() as stack:
        if args.beside:
            neighbours = stack.enter_context(Neighbours(args.beside))
            ways.append(Way(f"beside {args.beside}", around=neighbours.let_loose, beside=args.beside))
        if args.grammar:
            held = {"structured_outputs": {"json": SCHEMA}}
            ways.append(Way("a grammar", held | {"speculate": True}))
            ways.append(Way("a grammar, token by token", held | {"speculate": False}))
        if args.adapters:
            adapters = write_adapters(session, Path(stack.enter_context(TemporaryDirectory())), max(args.adapters))
            for num in args.adapters:
                ways.append(Way(f"{num} adapters", adapt=partial(_adapt, session.llm, adapters[:num])))
        yield ways


def _adapt(llm: LLM, adapters: list[LoRARequest], requests: list[Request]) -> None:
    llm.adapt(requests, [adapters[i % len(adapters)] for i in range(len(requests))])


def write_adapters(session: Session, folder: Path, num: int) -> list[LoRARequest]:
    """Random ones, of all linear layers."""
    layers = find_linear_layers(session.model_config)
    targets = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    found = []
    for number in range(num):
        path, tensors = folder / str(number), {}
        path.mkdir()
        for name, layer in layers.items():
            for part, shape in (("A", (RANK, layer.inputs)), ("B", (layer.count, RANK))):
                weight = torch.randn(shape, dtype=torch.float32).mul_(0.01).to(session.dtype)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = weight
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
        found.append(LoRARequest(f"adapter-{number}", number + 1, str(path)))
    return found
