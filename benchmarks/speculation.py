"""Speculation, turn by turn with none, on the same engine: tokens per second, drafts accepted, steps saved.

edit    a paragraph, to be written again with one word changed
quote   a page, and a question whose answer stands in it
code    a file of code that is to go on
free    a story, at temperature 0.8
noise   random token ids, at temperature 0.6: what is left for random weights

Paragraphs, pages and code are the project's own. There are three requests for each stream, so that whoever is done early makes
room for the next. Prompts are cached before they are timed, so a figure is of decoding. All but the last two are greedy; the
tokens of both turns are compared, and must be equal.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from benchmarks.figures import Figures
from benchmarks.options import add_model_options, add_run_options, positive_int
from benchmarks.report import Report
from benchmarks.session import Session, open_session
from benchmarks.workload import random_tokens
from nanoengine import SamplingParams
from nanoengine.features.speculation.statistics import SpeculationStats

ROOT = Path(__file__).parent.parent
WITHOUT = "without speculation"
REQUESTS = 3
"""For each stream."""

CONTEXT = 1536
"""Most tokens of a prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--proposer", default="ngram", help="ngram or model:NAME (default: %(default)s)")
    parser.add_argument("--num-drafts", type=positive_int, default=15, help="at most (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="(default: all)")
    parser.add_argument("--batch", nargs="+", type=positive_int, default=[1, 4, 16], help="(default: 1 4 16)")
    parser.add_argument("--output-len", type=positive_int, default=160, help="tokens (default: %(default)s)")
    add_model_options(parser)
    add_run_options(parser, repeat=3)


def run(args: argparse.Namespace, report: Report) -> None:
    args.option += [("speculation", args.proposer), ("num_drafts", args.num_drafts)]
    with open_session(args, report, CONTEXT + args.output_len) as session:
        for name in args.tasks:
            for batch in args.batch:
                for repetition in range(args.repeat):
                    turns = Turns(session, name, batch, args.output_len, 100 * repetition + args.seed)
                    before = _stats(session)
                    # Every second pair begins without: neither is always the later one.
                    in_turn = (True, False) if repetition % 2 == 0 else (False, True)
                    taken = {speculate: turns.take(speculate=speculate) for speculate in in_turn}
                    report.add({"task": name, "batch": batch}, taken[True] | _drafts(before, _stats(session)))
                    report.add({"task": name, "batch": batch}, taken[False], WITHOUT)


class Turns:
    """The same requests with speculation and without."""

    def __init__(self, session: Session, task: str, batch: int, output_len: int, seed: int):
        self.session, self.output_len = session, output_len
        self.temperature = {"free": 0.8, "noise": 0.6}.get(task, 0.0)
        rng = random.Random(seed)
        self.prompts = [TASKS[task](session, rng)[-CONTEXT:] for _ in range(REQUESTS * batch)]
        session.scheduler.max_num_seqs = batch
        session.llm.reset_prefix_cache()
        self._generate(1, speculate=False)
        self.tokens: list[list[int]] | None = None

    def take(self, *, speculate: bool) -> Figures:
        """Tokens per second of one turn, and its steps."""
        steps = self.session.llm.metrics.steps.num_decode_steps
        start = perf_counter()
        tokens = self._generate(self.output_len, speculate=speculate)
        seconds = perf_counter() - start
        if self.tokens is not None and tokens != self.tokens:
            self.session.report.warn("tokens with speculation and without differ")
        self.tokens = tokens
        count = sum(map(len, tokens))
        num_steps = self.session.llm.metrics.steps.num_decode_steps - steps
        return {"output_tok_s": count / seconds, "decode_steps": float(num_steps), "tokens": float(count)}

    def _generate(self, max_tokens: int, *, speculate: bool) -> list[list[int]]:
        params = [
            SamplingParams(temperature=self.temperature, seed=i, max_tokens=max_tokens, speculate=speculate)
            for i in range(len(self.prompts))
        ]
        outputs = self.session.llm.generate(self.prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


def _stats(session: Session) -> SpeculationStats:
    stats = session.llm.metrics.speculation
    assert stats is not None
    return replace(stats)


def _drafts(before: SpeculationStats, after: SpeculationStats) -> Figures:
    """What became of the drafts in between."""
    num_drafts, num_accepted = after.num_drafts - before.num_drafts, after.num_accepted - before.num_accepted
    return {"drafts": float(num_drafts), "accepted_rate": num_accepted / num_drafts if num_drafts else 0.0}


# ---- tasks


def _edit(session: Session, rng: random.Random) -> list[int]:
    text = rng.choice(_paragraphs())
    words = sorted({word for word in text.split() if word.isalpha() and len(word) > 4})
    word = rng.choice(words)
    task = f"Text:\n{text}\n\nThe same text, with the word {word!r} written as {word.upper()!r} everywhere:\n"
    return session.llm.tokenizer.encode(task + " ".join(text.split()[:6]))


def _quote(session: Session, rng: random.Random) -> list[int]:
    paragraphs = rng.sample(_paragraphs(), 4)
    first = " ".join(paragraphs[1].split()[:5])
    task = "Document:\n" + "\n\n".join(paragraphs)
    task += (
        f'\n\nQuestion: What does the document say where it begins with {first!r}?\nAnswer: The document says: "{first}'
    )
    return session.llm.tokenizer.encode(task)


def _code(session: Session, rng: random.Random) -> list[int]:
    lines = rng.choice(_sources()).splitlines()
    start = rng.randrange(max(1, len(lines) - 120))
    return session.llm.tokenizer.encode("\n".join(lines[start : start + 80]) + "\n")


def _free(session: Session, rng: random.Random) -> list[int]:
    subject = rng.choice(
        ("a lighthouse", "two brothers", "a lost letter", "the last train", "a quiet village", "the sea")
    )
    return session.llm.tokenizer.encode_chat([{"role": "user", "content": f"Write a story about {subject}."}])


def _noise(session: Session, rng: random.Random) -> list[int]:
    return random_tokens(rng, 256, session.vocab_size)


def _paragraphs() -> list[str]:
    """Of prose, neither short nor long."""
    pages = "\n\n".join(path.read_text() for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]))
    found = [" ".join(part.split()) for part in pages.split("\n\n")]
    return [part for part in found if 400 < len(part) < 1500 and not part.startswith(("|", "```", "#", "- ", ">"))]


def _sources() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "nanoengine" / "core").glob("*.py"))]


TASKS: dict[str, Callable[[Session, random.Random], list[int]]] = {
    "edit": _edit,
    "quote": _quote,
    "code": _code,
    "free": _free,
    "noise": _noise,
}
