"""Adapters: what a decode step and a prefill cost with some of them in the batch, beside the same without.

    python -m benchmarks.lora [--model qwen3-0.6b] [--streams 16] [--rank 16] [--adapters 1 4 16]

Engines without adapters, with `enable_lora` alone, and with so many adapters over the streams are measured in turn; figures are
medians, and so are ratios, of one turn each. Adapters are random, of all linear layers. Decodes are steps of all streams at once,
prefills steps of one prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from safetensors.torch import save_file

from benchmarks.random_weights import SHAPES, write_checkpoint
from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.lora.places import find_places
from nanoengine.models.model_config import ModelConfig
from nanoengine.models.names import find_model

NUMBERS = count(1)
"""Of prompts, so that none is like another."""


def write_adapters(folder: Path, config: ModelConfig, num: int, rank: int, dtype: torch.dtype) -> list[LoRARequest]:
    """Random ones, of all linear layers."""
    places = find_places(config)
    found = []
    for number in range(num):
        path = folder / str(number)
        path.mkdir()
        tensors = {}
        for name, place in places.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, place.inputs).mul_(0.01).to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(place.count, rank).mul_(0.01).to(dtype)
        save_file(tensors, path / "adapter_model.safetensors")
        targets = sorted({name.rpartition(".")[2] for name in places})
        said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        (path / "adapter_config.json").write_text(json.dumps(said))
        found.append(LoRARequest(f"adapter-{number}", number + 1, str(path)))
    return found


class Measured:
    """An engine, and the adapter of each stream."""

    def __init__(self, llm: LLM, adapters: list[LoRARequest], streams: int, context: int, steps: int):
        self.llm, self.adapters, self.context = llm, adapters, context
        self.each = [adapters[i % len(adapters)] if adapters else None for i in range(streams)]
        self.params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)

    def decode(self, steps: int) -> float:
        """Milliseconds of a step of all streams, the median of some."""
        engine, self.number = self.llm.engine, next(NUMBERS)
        prompts = [[(7 * i + 11 * j + self.number) % 1000 for j in range(self.context)] for i in range(len(self.each))]
        requests = self.llm.make_requests(prompts, self.params)
        self.llm._adapt(requests, self.each)
        for request in requests:
            engine.submit(request)
        while any(not request.sequences[0].output_token_ids for request in requests):
            engine.step()
        engine.step()
        times = []
        for _ in range(steps):
            start = perf_counter()
            engine.step()
            times.append(1e3 * (perf_counter() - start))
        for request in requests:
            engine.abort(request.request_id)
        return median(times)

    def prefill(self, length: int) -> float:
        """Milliseconds of a prompt of so many tokens."""
        self.number = next(NUMBERS)
        prompt = [(3 * j + self.number) % 1000 for j in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=1)
        start = perf_counter()
        self.llm.generate(prompt, params, lora_request=self.each[0], use_tqdm=False)
        return 1e3 * (perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of benchmarks/random_weights.py, or a model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is timed")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", help="of model and adapters")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    options = {"dtype": args.dtype, "quantization": args.quantization, "device": "cpu", "use_tqdm": False}
    options |= {"max_model_len": 2048, "max_num_seqs": args.streams, "max_lora_rank": max(args.rank, 16)}
    with tempfile.TemporaryDirectory() as folder:
        if args.model in SHAPES:
            model = Path(folder, "model")
            write_checkpoint(args.model, str(model))
            options["tokenizer"] = "demo"
        else:
            model = find_model(args.model)
        with LLM(str(model), **options) as plain, LLM(str(model), enable_lora=True, **options) as with_lora:
            config, most = plain.built.models.model_config, max(args.adapters, default=0)
            adapters = write_adapters(Path(folder), config, most, args.rank, getattr(torch, args.dtype))
            ways = {"no adapters": Measured(plain, [], args.streams, args.context, args.steps)}
            ways["enable_lora"] = Measured(with_lora, [], args.streams, args.context, args.steps)
            for num in args.adapters:
                ways[f"{num} adapters"] = Measured(with_lora, adapters[:num], args.streams, args.context, args.steps)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(args.repeat + 1):
                for name, way in ways.items():
                    times[name].append((way.decode(args.steps), way.prefill(args.prefill)))
    without = times["no adapters"][1:]  # the first turn warms up
    for name, measured in times.items():
        decode, prefill = (
            (
                median(own[i] for own in measured[1:]),
                median(own[i] / its[i] for own, its in zip(measured[1:], without, strict=True)),
            )
            for i in (0, 1)
        )
        print(
            f"{name:12}  decode {decode[0]:7.2f} ms ({decode[1]:.3f})  prefill {prefill[0]:7.1f} ms ({prefill[1]:.3f})"
        )


if __name__ == "__main__":
    main()
