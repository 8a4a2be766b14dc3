"""Batch inference: a dataset of prompts to a dataset of outputs, by engines in the actors of Ray Data.

Ray Data computes a batch again whose actor is lost. A token depends on weights, prompt, parameters and seed alone, so the batch
has the same outputs then; what is needed for it is a seed that depends on the row alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import xxhash

from nanoengine.core.errors import InvalidConfig, InvalidSamplingParams, NanoEngineError
from nanoengine.core.sampling_params import SamplingParams
from nanoengine.ray.cluster import connect, nodes, package
from nanoengine.ray.room import config_of_each, room_of_each

if TYPE_CHECKING:
    from nanoengine.core.config import EngineConfig

ADDED = ("text", "token_ids", "finish_reason", "error")
"""Columns of the outputs."""


def batch(
    dataset: Any,
    model: str = "demo",
    sampling_params: SamplingParams | None = None,
    *,
    batch_size: int = 256,
    prompt_column: str = "prompt",
    seed_column: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Complete the prompts of a Ray dataset; nothing runs before its result is asked for.

    The result has the rows of the dataset in their order, their columns, and four more: `text`, `token_ids`, `finish_reason` and
    `error`, which says why a row has no completion, or only a part of one, and is None otherwise.

    Args:
        dataset: a `ray.data.Dataset`.
        model: see `LLM`; every node must have it.
        sampling_params: of all rows, with n=1. None: as the model's makers advise.
        batch_size: rows that an engine is given at once; what a lost engine had is computed again.
        prompt_column: has strings, or lists of token ids.
        seed_column: has a seed for each row. None: where the params have no seed, a row's comes from `seed` and its prompt, so
            that rows with equal prompts get equal completions.
        seed: see there.
        options: those of `LLM`. `replicas` says how many engines there are (1),
            and ray_cpus and ray_gpus what each takes of a node. Where ray_cpus is not given, a CPU of each share is left for
            those who read the dataset: if the engines had all, nobody could.

    Raises:
        MissingPackage: Ray Data is not installed.
        UnknownOption, InvalidConfig, InvalidSamplingParams: a value that cannot work.
    """
    from nanoengine.builder import read_config
    from nanoengine.ray.options import RayOptions
    from nanoengine.replicas.options import ReplicaOptions

    data = package("ray.data")
    if sampling_params is not None and sampling_params.num_sequences != 1:
        raise InvalidSamplingParams(
            f"sampling_params ask for {sampling_params.num_sequences} completions: a row has one; repeat the rows, with a "
            "seed_column, for more"
        )
    columns = dataset.columns() or []
    for column in filter(None, (prompt_column, seed_column)):
        if column not in columns:
            raise InvalidConfig(f"the dataset has no column {column!r}; it has {columns}")
    if taken := sorted(set(ADDED) & set(columns)):
        raise InvalidConfig(f"the dataset has columns {taken}, which are those of the outputs: rename them")
    config = read_config(model, {"replicas": 1, "ray": True, **options})
    own = config.of(ReplicaOptions)
    connect(config.of(RayOptions).ray_address)
    room = room_of_each(config, nodes())
    if config.of(RayOptions).ray_cpus is None and not room.num_gpus:
        room = room._replace(num_cpus=max(1, room.num_cpus - 1))
    mapped = dataset.map_batches(
        Completer,
        fn_constructor_args=[config_of_each(config, room), sampling_params, prompt_column, seed_column, seed],
        compute=data.ActorPoolStrategy(min_size=own.replicas, max_size=own.replicas),
        num_cpus=room.num_cpus,
        num_gpus=room.num_gpus or None,
        batch_size=batch_size,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
    )
    mapped.context.execution_options.preserve_order = True
    return mapped


class Completer:
    """In the process of an actor: an engine, and the rows that it is given."""

    def __init__(
        self,
        config: EngineConfig,
        params: SamplingParams | None,
        prompt_column: str = "prompt",
        seed_column: str | None = None,
        seed: int = 0,
    ):
        from nanoengine.builder import build_engine

        self.engine = build_engine(config, False).engine
        self.params, self.seed = params or self.engine.default_params, seed
        self.prompt_column, self.seed_column = prompt_column, seed_column

    def __call__(self, table: Any) -> Any:
        """A pyarrow table with the columns of the outputs."""
        import pyarrow

        prompts = table[self.prompt_column].to_pylist()
        seeds = [None] * len(prompts) if self.seed_column is None else table[self.seed_column].to_pylist()
        rows = self.complete(prompts, seeds)
        kinds = (pyarrow.string(), pyarrow.list_(pyarrow.int64()), pyarrow.string(), pyarrow.string())
        for name, kind in zip(ADDED, kinds, strict=True):
            table = table.append_column(name, pyarrow.array([row[name] for row in rows], kind))
        return table

    def complete(self, prompts: list[Any], seeds: list[Any]) -> list[dict[str, Any]]:
        """The outputs of some rows, whatever is wrong with one of them."""
        rows: list[dict[str, Any]] = [dict.fromkeys(ADDED) for _ in prompts]
        requests = {}
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            try:
                prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
                requests[number] = self.engine.make_request(prompt, self._params(prompt, seed))
            except NanoEngineError as error:
                rows[number]["error"] = f"{type(error).__name__}: {error}"
        for request in requests.values():
            self.engine.submit(request)
        while self.engine.has_unfinished:
            self.engine.step()
        for number, request in requests.items():
            output = request.output().outputs[0]
            rows[number] |= {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
            if (failure := request.error) is not None:
                rows[number]["error"] = f"{type(failure).__name__}: {failure}"
        return rows

    def _params(self, prompt: Any, seed: int | None) -> SamplingParams:
        """Those of a row: with a seed that is the same whoever computes it."""
        if seed is None and self.params.seed is None:
            seed = xxhash.xxh3_64_intdigest(repr((self.seed, prompt)).encode())
        return self.params if seed is None else dataclasses.replace(self.params, seed=seed)
