"""The proposers of speculative decoding alone, without a model: what their guesses cost, and how many would have been right.

Outputs are replayed: at each step a proposer guesses up to --most tokens. Those that come true are taken, and the one behind
them, which the model would have sampled. `us_per_token` is CPU time over prompt and output, all calls for a sequence
together; `us_per_step` is that of a step of the output. `accepted_tokens` are those of a step that came true, `accepted_share`
is their share of all that were guessed.

prose   prompts and outputs cut from the documentation, in the demo model's tokens
copy    a text, then the same with 5 % of its tokens left out, replaced or followed by others
loop    a few tokens, again and again
noise   tokens whose frequencies follow Zipf's law, and nothing else
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from time import thread_time

from tokenizers import Tokenizer

from benchmarks.figures import Figures
from benchmarks.options import BadOption, positive_int
from benchmarks.report import Report
from nanoengine.speculation.ngram import NgramProposer
from nanoengine.speculation.proposer import Proposer

ROOT = Path(__file__).parent.parent
PROPOSERS: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer}
EDITS = 0.05
VOCAB_SIZE = 4096

Replay = tuple[list[int], list[int]]
"""A prompt, and the output that followed it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-seqs", type=positive_int, default=4, help="one after the other (default: %(default)s)")
    parser.add_argument("--input-len", type=positive_int, default=4000, help="(default: %(default)s)")
    parser.add_argument("--output-len", type=positive_int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--most", type=positive_int, default=8, help="tokens of a guess (default: %(default)s)")
    parser.add_argument("--repeat", type=positive_int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    for repetition in range(args.repeat):
        for text, make in TEXTS.items():
            random = Random(args.seed + repetition)
            replays = [make(args.input_len, args.output_len, random) for _ in range(args.num_seqs)]
            for name, proposer in PROPOSERS.items():
                report.add({"text": text, "proposer": name}, replay(proposer(), replays, args.most))


def replay(proposer: Proposer, replays: list[Replay], most: int) -> Figures:
    """Let a proposer guess each output in turn."""
    prompt_seconds = output_seconds = 0.0
    steps = guessed = accepted = num_prompt_tokens = num_output_tokens = 0
    for prompt, output in replays:
        token_ids = list(prompt)
        end = len(prompt) + len(output)
        start = thread_time()
        guesser = proposer.begin(prompt).fork()
        prompt_seconds += thread_time() - start
        while len(token_ids) < end:
            start = thread_time()
            guess = guesser.propose(token_ids, most)
            output_seconds += thread_time() - start
            rest = output[len(token_ids) - len(prompt) :]
            right = num_right(guess, rest[:-1])
            token_ids += rest[: right + 1]
            steps, guessed, accepted = steps + 1, guessed + len(guess), accepted + right
        num_prompt_tokens += len(prompt)
        num_output_tokens += len(output)
    return {
        "us_per_token": 1e6 * (prompt_seconds + output_seconds) / (num_prompt_tokens + num_output_tokens),
        "us_per_prompt_token": 1e6 * prompt_seconds / num_prompt_tokens,
        "us_per_step": 1e6 * output_seconds / steps,
        "accepted_tokens": accepted / steps,
        "accepted_share": accepted / guessed if guessed else 0.0,
    }


def num_right(guess: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of a guess come true, up to the first that does not."""
    pairs = zip(guess, output, strict=False)
    return next((i for i, (token, said) in enumerate(pairs) if token != said), min(len(guess), len(output)))


@cache
def documentation() -> list[int]:
    tokenizer = Tokenizer.from_file(str(ROOT / "nanoengine" / "demo" / "tokenizer.json"))
    paths = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
    ids: list[int] = tokenizer.encode("".join(path.read_text() for path in paths)).ids
    return ids


def prose(input_len: int, output_len: int, random: Random) -> Replay:
    ids, length = documentation(), input_len + output_len
    if length > len(ids):
        raise BadOption(f"--input-len and --output-len are {length} together: the documentation has {len(ids)} tokens")
    start = random.randrange(len(ids) - length + 1)
    return ids[start : start + input_len], ids[start + input_len : start + length]


def copy(input_len: int, output_len: int, random: Random) -> Replay:
    prompt, _ = prose(input_len, output_len, random)
    return prompt, list(islice(cycle(edited(prompt, random)), output_len))


def edited(token_ids: list[int], random: Random) -> list[int]:
    result: list[int] = []
    for token in token_ids:
        edit = random.choice(("leave out", "replace", "follow")) if random.random() < EDITS else ""
        if edit in ("", "follow"):
            result.append(token)
        if edit in ("replace", "follow"):
            result.append(random.randrange(VOCAB_SIZE))
    return result


def loop(input_len: int, output_len: int, random: Random) -> Replay:
    tokens = cycle([random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 8))])
    return list(islice(tokens, input_len)), list(islice(tokens, output_len))


def noise(input_len: int, output_len: int, random: Random) -> Replay:
    weights = [1 / rank for rank in range(1, VOCAB_SIZE + 1)]
    ids = random.choices(range(VOCAB_SIZE), weights, k=input_len + output_len)
    return ids[:input_len], ids[input_len:]


TEXTS = {"prose": prose, "copy": copy, "loop": loop, "noise": noise}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    report = Report("proposers")
    try:
        run(args, report)
    except BadOption as error:
        parser.error(str(error))
    report.show()


if __name__ == "__main__":
    main()
