"""What a soak expects of answers and of memory, and what is wrong with what came."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.http_client import Answer
from benchmarks.texts import windows
from nanoengine import LLM, SamplingParams
from nanoengine.core.outputs import RequestOutput
from nanoengine.sampling.token_logprobs import TokenLogprobs

MEMORY_GROWTH = 1.02
LEAST_NOTES = 12  # before memory is judged: it takes minutes until all caches are full
CLEAR_LOGPROB = 1e-3  # between the likeliest token and the next: sums in another order differ by a thousandth of that
PREFIX, PROMPT = 48, 96  # tokens: of what prompts share, and of a whole one

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Case:
    """A greedy request, and what must come of it."""

    request: dict[str, Any]
    text: str
    token_ids: list[int]
    finish_reason: str | None

    @property
    def path(self) -> str:
        return CHAT if "messages" in self.request else COMPLETIONS


def known_cases(model: str, number: int, max_model_len: int, seed: int) -> list[Case]:
    """Requests with their answers, offline: a third are chats, half of the others share beginnings, some end at a string."""
    rng = random.Random(seed)
    cases: list[Case] = []
    with LLM(model, dtype="float32", max_model_len=max_model_len, use_tqdm=False) as llm:
        pieces = windows(["prose", "code"], llm.tokenizer, number, PROMPT)
        rng.shuffle(pieces)
        for index, piece in enumerate(pieces):
            params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 96), logprobs=2)
            if index % 3 == 0:
                content = llm.tokenizer.decode(piece)[: rng.randint(20, 200)]
                request: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
                ask = partial(llm.chat, request["messages"], use_tqdm=False)
            else:
                shared = pieces[index % 2][:PREFIX] if index % 3 == 1 else []
                request = {"prompt": [*shared, *piece[: rng.randint(1, PROMPT)]]}
                ask = partial(llm.generate, request["prompt"], use_tqdm=False)
            output = ask(params)[0]
            if not _is_clear(output):
                continue
            text = output.outputs[0].text
            request |= {"temperature": 0, "max_tokens": params.max_tokens}
            if index % 4 == 0 and len(text) > 8:
                at = rng.randrange(len(text) - 3)
                request["stop"] = [text[at : at + 3]]
                output = ask(SamplingParams(temperature=0, max_tokens=params.max_tokens, stop=request["stop"]))[0]
            answer = output.outputs[0]
            cases.append(Case(request, answer.text, answer.token_ids, answer.finish_reason))
    return cases[:number]


def _is_clear(output: RequestOutput) -> bool:
    """Whether each token was the likeliest by far enough."""

    def margin(entries: TokenLogprobs) -> float:
        first, second, *_ = sorted((entry.logprob for entry in entries.values()), reverse=True)
        return first - second

    return all(margin(entries) > CLEAR_LOGPROB for entries in output.outputs[0].logprobs or [])


@dataclass
class Choice:
    """One completion, put together of the pieces of a stream, or whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


def choices_of(answer: Answer) -> dict[int, Choice]:
    """The completions of an answer, by index."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        parts = [json.loads(event[6:]) for event in answer.body.split(b"\n\n") if event.startswith(b"data: {")]
    else:
        parts = [json.loads(answer.body)]
    choices: dict[int, Choice] = {}
    for entry in (entry for part in parts for entry in part["choices"]):
        choice = choices.setdefault(entry["index"], Choice())
        said = entry.get("delta") or entry.get("message") or entry
        choice.text += said.get("content") or said.get("text") or ""
        choice.token_ids += entry.get("token_ids") or []
        if entry.get("finish_reason"):
            choice.finish_reasons.append(entry["finish_reason"])
    return choices


def fault(case: Case, n: int, answer: Answer, *, may_be_aborted: bool = False) -> str | None:
    """What is wrong with an answer, beginning with the kind of fault: failed, lost, doubled or wrong. None: nothing."""
    if not answer.is_ok:
        return f"failed: status {answer.status}, {answer.error}"
    if answer.event_times and not answer.is_done:
        return "lost: the end of the stream"
    choices = choices_of(answer)
    if set(choices) != set(range(n)):
        return f"{'lost' if len(choices) < n else 'doubled'}: choices {sorted(choices)} of {n}"
    for index, choice in choices.items():
        reasons = choice.finish_reasons
        if len(reasons) != 1:
            return f"{'doubled' if reasons else 'lost'}: choice {index} ends with {reasons}"
        is_aborted = may_be_aborted and reasons == ["abort"]
        if not is_aborted and reasons != [case.finish_reason]:
            return f"wrong: choice {index} ends with {reasons[0]}, not {case.finish_reason}"
        for got, expected in ((choice.token_ids, case.token_ids), (choice.text, case.text)):
            begins = expected[: len(got)] == got or (got is choice.text and _goes_on_to_a_stop(case, choice.text))
            if got != expected and not (is_aborted and begins):
                return f"{_difference(got, expected)}: choice {index} is {got!r}, not {expected!r}"
    return None


def _goes_on_to_a_stop(case: Case, text: str) -> bool:
    """Whether an aborted text is all that was expected and the beginning of the string that would have ended it."""
    stops = case.request.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    return text.startswith(case.text) and any(stop.startswith(text[len(case.text) :]) for stop in stops)


def _difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    if got == expected[: len(got)]:
        return "lost"
    return "doubled" if got[: len(expected)] == expected else "wrong"


@dataclass
class Note:
    """The server at a time: seconds since the start, bytes in RAM, and what it says of itself."""

    seconds: float
    resident: int
    gauges: dict[str, float]


def memory_fault(notes: Sequence[Note]) -> str | None:
    """Whether the last quarter took more memory than there was after the first; None if not, or if the time was too short."""
    if len(notes) < LEAST_NOTES:
        return None
    total = notes[-1].seconds
    before = max(note.resident for note in notes if note.seconds <= 0.25 * total)
    last = sorted(note.resident for note in notes if note.seconds >= 0.75 * total)
    after = last[len(last) // 2]
    if after <= MEMORY_GROWTH * before:
        return None
    return f"memory: {before >> 20} MiB after a quarter of the time, {after >> 20} MiB in the last"
