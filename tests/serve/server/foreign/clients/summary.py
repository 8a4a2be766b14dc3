"""What came of all checks, by client: `summary.py TABLE COUNTS` adds a table to TABLE, and a line to COUNTS."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

KINDS = ("passed", "refused rightly", "weak model", "FAULT")


def main(table: Path, counts: Path) -> None:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for line in table.read_text().splitlines()[2:]:
        client, feature, result = line.strip("| ").split(" | ", 2)
        of_ai = f": {feature.partition(': ')[0]}" if client.startswith("ai ") and ": " in feature else ""
        of_litellm = f": {feature.partition('`: ')[0]}`" if client.startswith("litellm") and "/`: " in feature else ""
        kind = next(own for own in KINDS if result.startswith(own))
        for name in (client + of_ai + of_litellm, "all"):
            found[name]["calls"] += 1
            found[name][kind] += 1
    all_ = found.pop("all")
    text = f"\n| client | calls | {' | '.join(KINDS).lower()} |\n" + "| --- " * 6 + "|\n"
    for name, own in [*found.items(), ("all", all_)]:
        text += f"| {name} | {own['calls']} | {' | '.join(str(own[kind]) for kind in KINDS)} |\n"
    print(text)
    with table.open("a") as file:
        file.write(text)
    with counts.open("a") as file:
        file.write(f"clients: {all_['calls'] - all_['FAULT']} passed, {all_['FAULT']} failed, 0 excluded ({table})\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
