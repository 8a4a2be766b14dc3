"""Sees that the checks can fail: behind a proxy that spoils one kind of answers, those that look at this kind do.

Usage: launch.py MODEL -- PYTHON spoiled.py TABLE COUNTS. A row in TABLE for each kind and check; a line in COUNTS for each kind.
With the kind "nothing" all of them pass: the proxy itself breaks none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spoiler import KINDS, spoiler

NOT_TOLD = {("anthropic", "logprobs"), ("ollama", "logprobs"), ("ollama", "index"), ("ollama", "ids")}
"""What a client has no field for. Ollama's leaves out the indices and ids of calls that the server sends."""


def run(kind: str, table: Path, counts: Path) -> None:
    """One kind, in a process of its own: clients are made with the address of the proxy."""
    with spoiler(os.environ["SERVER_URL"], kind) as url:
        os.environ["SERVER_URL"] = url
        import checks

        checks.load()
        faults: dict[str, int] = {}
        rows = []
        for own in checks.CHECKS:
            if kind in own.catches or (kind == "nothing" and own.catches):
                result, why = checks.outcome(own.run)
                faults[own.client] = faults.get(own.client, 0) + (result == "FAULT")
                rows.append(f"| {kind} | {own.client} | {own.feature} | {result} {checks.on_one_line(why)} |")
                print(rows[-1], flush=True)
    clients = sorted({own.client for own in checks.CHECKS})
    seen = [own for own in clients if (own, kind) not in NOT_TOLD]
    right = [own for own in seen if (faults.get(own, 0) > 0) == (kind != "nothing")]
    with table.open("a") as file:
        file.write("\n".join(rows) + "\n")
    with counts.open("a") as file:
        file.write(f"spoiled-{kind}: {len(right)} passed, {len(seen) - len(right)} failed, 0 excluded ({faults})\n")


def main(table: Path, counts: Path) -> None:
    table.write_text("| spoiled | client | check | result |\n| --- | --- | --- | --- |\n")
    for kind in KINDS:
        subprocess.run([sys.executable, "-W", "ignore", __file__, str(table), str(counts), kind], check=True)


if __name__ == "__main__":
    paths = map(Path, sys.argv[1:3])
    run(sys.argv[3], *paths) if len(sys.argv) > 3 else main(*paths)
