"""JSON-Schema-Test-Suite, draft 2020-12: which invalid instances are accepted? A ratchet: those that are, are declared.

python -m benchmarks.proofs.schema_suite FOLDER [--declare]

FOLDER is a checkout of https://github.com/json-schema-org/JSON-Schema-Test-Suite. schema_suite.txt, beside this file, holds the
declared false accepts. One that is not in it fails, and so does one of it that no longer happens; --declare writes it anew. A
valid instance that is refused is counted only: llguidance writes properties in the order of the schema, the suite does not.
Tests in `optional/` are part of it. A schema that is refused needs no more: nothing is promised of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.proofs.acceptance import Acceptance, written
from benchmarks.proofs.maskbench import in_order

DECLARED = Path(__file__).with_suffix(".txt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with tests/draft2020-12 in it")
    parser.add_argument("--declare", action="store_true", help="the false accepts of this run are the declared ones")
    args = parser.parse_args()
    counts, reasons, accepts = run(args.folder / "tests" / "draft2020-12", Acceptance("demo"))
    for table in (counts, reasons):
        for name, count in table.most_common():
            print(f"{count:6} {name}")
        print()
    if args.declare:
        DECLARED.write_text("".join(f"{name}\n" for name in sorted(accepts)), "utf-8")
        return 0
    declared = set(DECLARED.read_text("utf-8").splitlines())
    for name in sorted(accepts - declared):
        print(f"new false accept: {name}")
    for name in sorted(declared - accepts):
        print(f"declared, but does not happen: {name}")
    return int(accepts != declared)


def run(folder: Path, acceptance: Acceptance) -> tuple[Counter[str], Counter[str], set[str]]:
    """Counts, reasons why schemas are refused, and the false accepts."""
    counts, reasons, accepts = Counter[str](), Counter[str](), set[str]()
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            outputs = acceptance.counted_outputs(group["schema"], counts, reasons)
            if outputs is None:
                continue
            for test in group["tests"]:
                accepted = accepts_either(acceptance, outputs, test["data"], group["schema"])
                counts[f"{'valid' if test['valid'] else 'invalid'}, {'accepted' if accepted else 'refused'}"] += 1
                name = f"{path.relative_to(folder).as_posix()} | {group['description']} | {test['description']}"
                if accepted and not test["valid"]:
                    accepts.add(name)
                if test["valid"] and not accepted:
                    print(f"valid, but refused: {name}")
    return counts, reasons, accepts


def accepts_either(acceptance: Acceptance, outputs: Any, value: Any, schema: Any) -> bool:
    """As the suite writes it, or with its properties in the order of the schema."""
    texts = dict.fromkeys((written(value), written(in_order(value, schema, schema))))
    return any(acceptance.refused_at(outputs, text) is None for text in texts)


if __name__ == "__main__":
    sys.exit(main())
