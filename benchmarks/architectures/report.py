"""The outcomes of all architectures: totals, the table in docs/models.md, and the file that tests expect them from."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import transformers

from benchmarks.architectures.judge import Outcome

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs" / "models.md"
EXPECTED = ROOT / "tests" / "models" / "transformers_backend" / "expected.json"
MOST = 120
"""Characters of a reason in the table."""

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
WORDS = {
    "nanoengine": "equal, computed by a family",
    "transformers": "equal, computed by transformers' modules",
    "noise": "differs, and transformers' two kinds of attention differ as much",
    "differs": "differs",
    "refused": "refused",
    "crash": "crash",
    "not made": "no checkpoint made",
}
"""Kinds of outcomes, in the order of the table."""


def totals(outcomes: Mapping[str, Outcome]) -> str:
    counts = Counter(outcome.kind for outcome in outcomes.values())
    parts = [f"{counts[kind]} {words}" for kind, words in WORDS.items() if counts[kind]]
    return f"{len(outcomes)} architectures: {'; '.join(parts)}"


def table(outcomes: Mapping[str, Outcome]) -> str:
    """A row for those of one kind and reason."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, outcome in sorted(outcomes.items()):
        reason = f"{outcome.worst:.1e}" if outcome.kind in ("noise", "differs") else same_reason(name, outcome.reason)
        groups[outcome.kind, reason].append(name)
    lines = ["| how | number | architectures | largest difference of a log probability |", "| --- | --- | --- | --- |"]
    order = list(WORDS)
    for (kind, reason), names in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]))):
        how = WORDS[kind] + (f": {cell(reason)}" if reason and kind not in ("noise", "differs") else "")
        lines.append(f"| {how} | {len(names)} | {listed(names)} | {differences([outcomes[name] for name in names])} |")
    return "\n".join(lines)


def same_reason(name: str, reason: str) -> str:
    """A reason without names of classes and without numbers, so that those of several architectures are one."""
    class_name, _, model_type = name.partition(":")
    stem = re.split("For[A-Z]|LMHead|ModelWith", class_name)[0]
    words = (
        reason.split("transformers' modules do not run here: ")[-1].split("; supported are")[0].split(": missing (")[0]
    )
    if model_type:
        words = re.sub(rf"\b{model_type}\b", "...", words)
    words = re.sub(r"(?<![\w.])\d[\d.]*\b", "N", re.sub(rf"\b{stem}\w*", "...", words))
    return words if len(words) <= MOST else words[:MOST].rpartition(" ")[0] + " ..."


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def listed(names: Iterable[str]) -> str:
    """Names without the word that most of them end in."""
    return ", ".join(re.sub(r"ForCausalLM\b", "", name) for name in names)


def differences(outcomes: Iterable[Outcome]) -> str:
    some = list(outcomes)
    worst, noise = (max(getattr(outcome, key) for outcome in some) for key in ("worst", "noise"))
    if not worst:
        return ""
    return f"{worst:.1e}" + (f" (transformers' sdpa from its eager attention: {noise:.1e})" if noise else "")


def write_docs(outcomes: Mapping[str, Outcome], path: Path = DOCS) -> None:
    """Replace what is between the two comments."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    date = datetime.datetime.now(datetime.UTC).date()
    said = (
        f"{totals(outcomes)}. transformers {transformers.__version__}, {date}. `ForCausalLM` is left out of the names."
    )
    path.write_text(f"{before}{BEGIN}\n{said}\n\n{table(outcomes)}\n{END}{after}")


def write_expected(outcomes: Mapping[str, Outcome], path: Path = EXPECTED) -> None:
    kinds = {name: outcome.kind for name, outcome in sorted(outcomes.items())}
    path.write_text(json.dumps(kinds, indent=1) + "\n")
