"""Short loads by guidellm on the server at $SERVER_URL: every request must be answered, with as many tokens as it asked for.

Usage: load.py GUIDELLM TOKENIZER_FOLDER SCRATCH COUNTS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NUM_REQUESTS = 48
NUM_TOKENS = 24


def main(guidellm: str, tokenizer: str, scratch: str, counts: str) -> int:
    passed = failed = 0
    for path in ("/v1/completions", "/v1/chat/completions"):
        report = Path(scratch) / "load.json"
        report.unlink(missing_ok=True)
        subprocess.run(
            [
                *(guidellm, "run", "--disable-console"),
                *("--backend", f"kind=openai_http,target={os.environ['SERVER_URL']},request_format={path}"),
                *("--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"),
                *("--output", f"kind=json,path={report}"),
            ],
            check=False,
            timeout=300,
        )
        if not report.exists():
            print(f"{path}: guidellm made no report")
            failed += NUM_REQUESTS
            continue
        requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
        good = [r for r in requests["successful"] if r["output_metrics"]["text_tokens"] == NUM_TOKENS]
        print(
            f"{path}: {len(good)} of {NUM_REQUESTS} answered with {NUM_TOKENS} tokens; {len(requests['errored'])} errors"
        )
        passed += len(good)
        failed += NUM_REQUESTS - len(good)
    with Path(counts).open("a") as file:
        file.write(f"load: {passed} passed, {failed} failed, 0 excluded (requests of guidellm)\n")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
