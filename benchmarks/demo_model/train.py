"""Train the demo model from the sources of the Python standard library, in three steps.

    python -m benchmarks.demo_model.train prepare --work WORK             tokenizer and tokens; needs the corpus
    python -m benchmarks.demo_model.train fit --work WORK --minutes 8     weights; wants a GPU, needs no corpus
    python -m benchmarks.demo_model.train join --work WORK                the model folder, nanoengine/demo

`fit` ends itself: `--minutes` counts from its start, and the learning rate falls with the share of the time used,
so it always completes.  On a CPU, which sees the corpus only a few times, use `--dropout 0 --batch-tokens 8192
--short-share 0.8`: the rows of 4096 come last.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from benchmarks.demo_model.folder import join, model_config, save_weights
from nanoengine.models.names import DEMO

LIBRARY_WEIGHT = 2  # the held-out files are library modules, and tests are two thirds of the corpus
MUON_RATE, MUON_DECAY = 4e-3, 0.1
ADAM_RATE, ADAM_DECAY = 2e-3, 0.1
WARM_UP = 0.02
EMA_DECAY = 0.99
LOG_SECONDS = 30.0
RESERVE_SECONDS = 5.0


@dataclass(frozen=True)
class Recipe:
    """What a training run may vary: its time, the size of its batches and how it fends off memorising."""

    minutes: float
    batch_tokens: int
    dropout: float
    short_length: int
    short_share: float


def prepare(corpus_folder: Path | None, work: Path) -> None:
    """Split the corpus, train the tokenizer on the training part, and write all tokens to `work/tokens.npz`."""
    from benchmarks.demo_model import corpus  # the other steps do without the `tokenizers` package

    parts = corpus.split(corpus.read_documents(corpus_folder or corpus.standard_library()))
    tokenizer = corpus.train_tokenizer(d.text for d in parts.train)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(work / "tokenizer.json"))
    (work / "heldout.txt").write_text("".join(f"{d.path}\n" for d in parts.held_out))
    arrays: dict[str, np.ndarray] = {"is_test": np.array([d.is_test for d in parts.train])}
    for name, documents in (("train", parts.train), ("dev", parts.dev)):
        pieces = [[0, *e.ids] for e in tokenizer.encode_batch([d.text for d in documents])]
        arrays[name] = np.concatenate([np.array(p, dtype=np.uint16) for p in pieces])
        arrays[f"{name}_ends"] = np.cumsum([len(p) for p in pieces])
        arrays[f"{name}_bytes"] = np.array([len(d.text.encode()) for d in documents])
        print(f"{name}: {len(documents)} documents, {arrays[f'{name}_bytes'].sum()} bytes, {len(arrays[name])} tokens")
    np.savez(work / "tokens.npz", **arrays)  # type: ignore[arg-type]


def batches(data: dict[str, np.ndarray], length: int, size: int, device: str) -> Iterator[torch.Tensor]:
    """Endless batches of `size` rows of `length + 1` tokens; every epoch shuffles documents and moves the cuts."""
    random = np.random.default_rng(0)
    documents = np.split(data["train"], data["train_ends"][:-1])
    order = np.repeat(np.arange(len(documents)), np.where(data["is_test"], 1, LIBRARY_WEIGHT))
    while True:
        random.shuffle(order)
        stream = np.concatenate([documents[i] for i in order])[random.integers(length) :]
        tokens = torch.from_numpy(stream.astype(np.int32)).to(device)
        rows = tokens.unfold(0, length + 1, length)
        shuffled = torch.from_numpy(random.permutation(len(rows))).to(device)
        for chosen in shuffled.split(size):
            if len(chosen) == size:
                yield rows[chosen].long()


def add_dropout(model: Qwen3ForCausalLM, rate: float) -> None:
    """Drop parts of the embeddings and of what each attention and MLP block adds, which Qwen3 has no setting for."""

    def drop(module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, rate, module.training)

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj", "embed_tokens")):
            module.register_forward_hook(drop)


def loss_function(model: Qwen3ForCausalLM) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mean cross entropy of rows of tokens, as a function that `torch.compile` can take whole."""

    def loss(rows: torch.Tensor) -> torch.Tensor:
        # A ready "no mask" keeps transformers from building one, and so SDPA on its causal flash path.
        hidden = model.model(rows[:, :-1], attention_mask={"full_attention": None}, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden).float()
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    return loss


def optimizers(model: Qwen3ForCausalLM, cuda: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": ADAM_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=MUON_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.95), fused=cuda),
    ]


def dev_bits_per_byte(model: Qwen3ForCausalLM, data: dict[str, np.ndarray]) -> float:
    """Bits per byte on the dev documents, by the same windows as the held-out measurement."""
    from benchmarks.demo_model.measure import document_bits

    documents = np.split(data["dev"].astype(np.int64), data["dev_ends"][:-1])
    with torch.autocast(model.device.type, torch.bfloat16):
        bits = sum(document_bits(model, torch.from_numpy(d)) for d in documents)
    return bits / float(data["dev_bytes"].sum())


def fit(data: dict[str, np.ndarray], work: Path, recipe: Recipe) -> None:
    """Train for `recipe.minutes` and leave the best averaged weights by dev loss, and a log, in `work`."""
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Qwen3ForCausalLM(model_config()).to(device)
    average = copy.deepcopy(model).eval()
    add_dropout(model, recipe.dropout)
    full = model.config.max_position_embeddings
    length = min(recipe.short_length, full) if recipe.short_share else full
    source = batches(data, length, max(1, recipe.batch_tokens // length), device)
    parameters, averaged = list(model.parameters()), list(average.parameters())
    steppers = optimizers(model, device == "cuda")
    rates = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    loss_of = torch.compile(loss_function(model))
    log = (work / "log.txt").open("w")

    def report(line: str) -> None:
        for stream in (sys.stdout, log):
            print(line, file=stream, flush=True)

    report(f"{sum(p.numel() for p in parameters)} parameters on {device}; {recipe}")
    measuring = time.monotonic()
    best = dev_bits_per_byte(average, data)
    cost = time.monotonic() - measuring
    # The last measurement and the writing of the weights belong to the minutes too.
    deadline = began + 60 * recipe.minutes - RESERVE_SECONDS - cost
    interval = max(LOG_SECONDS, 60 * recipe.minutes / 6)
    report(f"untrained: dev {best:.4f} bits/byte")
    step, tokens, first, next_log = 0, 0, 0.0, time.monotonic() + interval
    share = 0.0
    while share < 1:
        rows = next(source)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(rows)
        loss.backward()
        now = time.monotonic()
        first = first or now  # compiling is over: the schedule starts here
        share = min(1.0, (now - first) / max(1.0, deadline - first))
        scale = min(share / WARM_UP, 1.0) * (1.0 - share)
        for stepper, own in zip(steppers, rates, strict=True):
            for group, rate in zip(stepper.param_groups, own, strict=True):
                group["lr"] = rate * scale
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        step, tokens = step + 1, tokens + rows.shape[0] * length
        with torch.no_grad():
            torch._foreach_lerp_(averaged, parameters, 1 - min(EMA_DECAY, (1 + step) / (10 + step)))
        if length < full and share >= recipe.short_share:
            length = full
            source = batches(data, length, max(1, recipe.batch_tokens // length), device)
        if share < 1 and (now < next_log or now + 2 * cost > deadline):
            continue
        dev = dev_bits_per_byte(average, data)
        report(
            f"{share:6.1%} step {step} loss {loss.item():.4f} dev {dev:.4f} bits/byte, length {length}, "
            f"{tokens / 1e6:.1f} M tokens, {tokens / max(now - first, 1e-9) / 1e3:.1f} k/s"
        )
        if dev < best:
            best = dev
            save_weights(average, work / "model.safetensors")
        next_log = time.monotonic() + interval
    report(f"best dev {best:.4f} bits/byte; {time.monotonic() - began:.0f} s in all")
    log.close()


def main() -> None:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description="train the demo model")
    parser.add_argument("step", choices=["prepare", "fit", "join"])
    parser.add_argument("--work", type=Path, required=True, help="folder for what one step leaves to the next")
    parser.add_argument("--corpus", type=Path, help="folder of sources; by default the running Python's library")
    parser.add_argument("--out", type=Path, default=DEMO, help="the model folder that join writes")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch-tokens", type=int, default=98304)
    parser.add_argument("--dropout", type=float, default=0.1, help="0 where the corpus is seen only a few times")
    parser.add_argument("--short-length", type=int, default=1024, help="tokens in a row in the first phase")
    parser.add_argument("--short-share", type=float, default=0.0, help="share of the time that phase takes")
    options = parser.parse_args()
    if options.step == "prepare":
        prepare(options.corpus, options.work)
    elif options.step == "fit":
        names = [field.name for field in fields(Recipe)]
        with np.load(options.work / "tokens.npz") as archive:
            fit(dict(archive), options.work, Recipe(**{name: getattr(options, name) for name in names}))
    else:
        join(options.work, options.out)


if __name__ == "__main__":
    main()
