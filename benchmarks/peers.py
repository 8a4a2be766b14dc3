"""Peers: the same weights and the same work in Hugging Face transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from benchmarks.drive import TEMPERATURE, RequestTimes, Run
from benchmarks.workload import Workload

PAD = 0


def load_in_transformers(path: Path, dtype: torch.dtype | str) -> Any:
    """The model at a path that `find_model` gave, in transformers."""
    file = {} if path.is_dir() else {"gguf_file": path.name}
    return transformers.AutoModelForCausalLM.from_pretrained(
        path if path.is_dir() else path.parent, dtype=dtype, **file
    )


class Generate:
    """transformers' `generate`: left-padded batches, of which only the wanted tokens are counted.

    Args:
        path: the checkpoint: a folder or a GGUF file.
        kv_tokens: how many tokens of K/V a batch may hold, padding included: as many as our own pool.
    """

    name = "transformers"
    reports_tokens = True

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, kv_tokens: int):
        transformers.utils.logging.disable_progress_bar()
        self.device = device
        self.kv_tokens = kv_tokens
        self.model: Any = load_in_transformers(path, dtype).eval().to(device)
        self.model.generation_config.eos_token_id = None  # end-of-text tokens are ignored

    def run(self, workload: Workload) -> Run:
        """Batches one after the other, in the order of the workload."""
        longest = max(map(len, workload.prompts)) + max(workload.output_lens)
        size = max(self.kv_tokens // longest, 1)
        run = Run([RequestTimes(0.0, len(prompt)) for prompt in workload.prompts])
        start = perf_counter()
        for first in range(0, len(workload), size):
            part = slice(first, first + size)
            stamps = _Stamps(start)
            self._generate(Workload(workload.prompts[part], workload.output_lens[part]), stamps)
            for request, count in zip(run.requests[part], workload.output_lens[part], strict=True):
                request.token_times = stamps.times[:count]
        run.seconds = perf_counter() - start
        return run

    @torch.inference_mode()
    def _generate(self, batch: Workload, stamps: _Stamps) -> None:
        rows = [torch.tensor(prompt) for prompt in batch.prompts]
        ids = pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left").to(self.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        out = self.model.generate(
            ids,
            attention_mask=mask.to(self.device),
            max_new_tokens=max(batch.output_lens),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            pad_token_id=PAD,
            stopping_criteria=[stamps],
        )
        assert out.shape[1] == ids.shape[1] + max(batch.output_lens)


class _Stamps(transformers.StoppingCriteria):
    """Notes the time of every token, and never stops."""

    def __init__(self, start: float):
        self.start = start
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
        input_ids[0, -1].item()  # waits for the device
        self.times.append(perf_counter() - self.start)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class ContinuousBatching:
    """transformers' continuous batching. Its manager runs only while it is measured, so that its thread disturbs nobody.

    Args:
        model: as `Generate` has loaded it.
        kv_tokens: size of its pool, as our own.
        max_num_seqs: as our own.
    """

    name = "transformers continuous batching"
    reports_tokens = False  # it hands out finished requests, so only the whole time is known
    page_size = 128
    max_batch_tokens = 2048

    def __init__(self, model: Any, kv_tokens: int, max_num_seqs: int):
        logging.getLogger("ContinuousBatchingLogger").setLevel(
            logging.CRITICAL
        )  # on a CPU it misses psutil, needlessly
        self.model = model
        self.kv_tokens = kv_tokens
        self.max_num_seqs = max_num_seqs

    def run(self, workload: Workload) -> Run:
        """All requests at once. Raises RuntimeError or MemoryError if it does not work here."""
        lens = [len(p) + n for p, n in zip(workload.prompts, workload.output_lens, strict=True)]
        needed = sum(-(-length // self.page_size) for length in lens)
        # Its attention mask is as large as a step's tokens times its pool, so neither may be larger than it has to be.
        config = transformers.ContinuousBatchingConfig(
            page_size=self.page_size,
            num_blocks=min(needed, self.kv_tokens // self.page_size),
            max_batch_tokens=self.max_batch_tokens,
            max_requests_per_batch=self.max_num_seqs,
        )
        generation = transformers.GenerationConfig(
            do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1, pad_token_id=PAD
        )
        run = Run([RequestTimes(0.0, len(prompt)) for prompt in workload.prompts])
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            start = perf_counter()
            wanted = {}
            for prompt, count in zip(workload.prompts, workload.output_lens, strict=True):
                wanted[manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)] = count
            while wanted:
                result = manager.get_result(timeout=1.0)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("its thread has died")
                elif result.error:
                    raise RuntimeError(result.error)
                elif result.is_finished() and len(result.generated_tokens) != wanted.pop(result.request_id):
                    raise RuntimeError("it stopped a request early")
            run.seconds = perf_counter() - start
        return run
