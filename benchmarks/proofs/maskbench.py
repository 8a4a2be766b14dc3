"""MaskBench: are valid instances of real schemas accepted, and invalid ones refused?

python -m benchmarks.proofs.maskbench FOLDER [--schemas 500] [--seed 0] [--model demo]

FOLDER is a checkout of https://github.com/guidance-ai/jsonschemabench. An instance is written with the separators of
`disable_any_whitespace`, its properties in the order of the file, which is that of the schema for most (the authors have put
them so, because llguidance writes properties in that order). An instance that is refused is tried once more with its properties
in the order of the schema, whether it is valid or not. Ends with 1 if an invalid instance is accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.acceptance import Acceptance, written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with maskbench/data in it")
    parser.add_argument("--schemas", type=int, default=500, help="how many are drawn; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo", help="whose tokenizer: demo, a folder or a .gguf file")
    args = parser.parse_args()
    files = sorted((args.folder / "maskbench" / "data").glob("*.json"))
    drawn = random.Random(args.seed).sample(files, args.schemas) if args.schemas else files
    acceptance, counts, reasons = Acceptance(args.model), Counter[str](), Counter[str]()
    for path in drawn:
        case = json.loads(path.read_text("utf-8"))
        tests = case.get("tests", [])
        outputs = acceptance.counted_outputs(case["schema"], counts, reasons)
        if outputs is None:
            continue
        counts["of them without instances"] += not tests
        for test in tests:
            label = "valid" if test["valid"] else "invalid"
            try:
                text = written(test["data"])
                place = acceptance.refused_at(outputs, text)
                again = written(in_order(test["data"], case["schema"], case["schema"]))
                if place is not None and again != text and acceptance.refused_at(outputs, again) is None:
                    text, place, label = again, None, f"{label} (in the schema's order only)"
            except RuntimeError as error:
                counts[f"{label}: beyond a limit"] += 1
                print(f"{path.name}: {error}")
                continue
            counts[f"{label}, {'accepted' if place is None else 'refused'}"] += 1
            if (place is None) != test["valid"]:
                print(f"{path.name}: {label}, {'accepted' if place is None else f'refused at {place}'}")
                print(f"    {text if place is None else text[max(place - 60, 0) : place + 20]}"[:200])
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    print("schemas refused, by reason:")
    for name, count in reasons.most_common():
        print(f"{count:6} {name}")
    shares = {f"p{p}": round(float(np.percentile(acceptance.mask_us, p)), 1) for p in (50, 90, 99, 99.9, 100)}
    print(f"{len(acceptance.mask_us)} masks in microseconds, one at a time: {shares}")
    print(f"{acceptance.num_respelled} of these tokens were spelled otherwise than by the tokenizer")
    return int(any(name.startswith("invalid") and name.endswith("accepted") for name in counts))


def in_order(value: Any, schema: Any, root: Any) -> Any:
    """The same value, its properties in the order in which the schema has them; others behind."""
    while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and "properties" not in schema:
        if (schema := found(schema["$ref"], root)) is None:
            return value
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        return [in_order(own, schema.get("items"), root) for own in value]
    if not isinstance(value, dict):
        return value
    known: dict[str, Any] = dict(schema.get("properties", {}))
    for part in (*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        part = found(part["$ref"], root) if isinstance(part, dict) and "$ref" in part else part
        known |= {name: own for name, own in (part or {}).get("properties", {}).items() if name not in known}
    names = [name for name in known if name in value] + [name for name in value if name not in known]
    return {name: in_order(value[name], known.get(name, schema.get("additionalProperties")), root) for name in names}


def found(pointer: str, root: Any) -> Any:
    """What a reference within the schema points at; None if it is another kind of reference."""
    if not pointer.startswith("#/"):
        return root if pointer == "#" else None
    for key in pointer[2:].split("/"):
        key = key.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, dict) else None
    return root


if __name__ == "__main__":
    sys.exit(main())
