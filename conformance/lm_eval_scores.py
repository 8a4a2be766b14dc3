"""Compares log-likelihoods that lm-eval gets from the server at $SERVER_URL with those of transformers on the same folder.

Usage: lm_eval_scores.py FOLDER SCRATCH COUNTS. Both sides are lm-eval's own: `local-completions` and `hf`, in float32.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

MOST_DIFFERENCE = 1e-3
QUESTIONS = [
    ("import os\n\npath =", [" os.path.join(a, b)", " banana", " 5"], 0),
    ("def is_even(n):\n    return", [" n % 2 == 0", " def", " None"], 0),
    ("for i in", [" range(10):", " class", " items:"], 0),
    ("class Stack:\n    def __init__(self):\n        self.items =", [" []", " import", " None"], 0),
    ("try:\n    value = int(text)\nexcept", [" ValueError:", " while", " TypeError:"], 0),
    ("with open(name) as", [" file:", " f:", " yield"], 1),
    ("if __name__ ==", [" '__main__':", " None:", " elif"], 0),
    ("x = [a * b for a, b in", [" zip(p, q)]", " return", " range(3)]"], 0),
]


def make_tasks(folder: Path) -> list[str]:
    """Two tasks over a file of ours: one that chooses among continuations, one that scores whole texts."""
    data = folder / "questions.json"
    data.write_text("\n".join(json.dumps({"text": t, "choices": c, "answer": a}) for t, c, a in QUESTIONS))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    (folder / "choose.yaml").write_text(
        f"task: nano_choose\n{common}output_type: multiple_choice\ndoc_to_text: '{{{{text}}}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    (folder / "whole.yaml").write_text(
        f"task: nano_whole\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{text}}'\nmetric_list: [{metric: word_perplexity}]\n"
    )
    return ["nano_choose", "nano_whole"]


def scores(tasks: list[str], folder: Path, client: str, **arguments: Any) -> dict[tuple[str, int, int], float]:
    """Log-likelihood by task, document and choice."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=client, model_args=arguments, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    found = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            for choice, response in enumerate(sample["resps"]):
                value = response[0]
                found[task, sample["doc_id"], choice] = float(value[0] if isinstance(value, (list, tuple)) else value)
    return found


def main(model: str, scratch: str, counts: str) -> int:
    folder = Path(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = make_tasks(folder)
    truth = scores(tasks, folder, "hf", pretrained=model, dtype="float32", device="cpu", batch_size=1)
    passed = failed = 0
    for backend, batch in (("huggingface", 1), ("huggingface", 4), ("remote", 1)):
        ours = scores(
            tasks,
            folder,
            "local-completions",
            model=os.environ["SERVED_NAME"],
            base_url=os.environ["SERVER_URL"] + "/v1/completions",
            tokenizer_backend=backend,
            tokenizer=model,
            batch_size=batch,
            num_concurrent=1 if batch == 1 else 2,
            max_retries=1,
        )
        if ours.keys() != truth.keys():
            failed += len(truth)
            print(f"{backend} in batches of {batch}: {len(ours)} scores, {len(truth)} expected")
            continue
        differences = {key: abs(ours[key] - truth[key]) for key in truth}
        wrong = {key: (ours[key], truth[key]) for key, value in differences.items() if not value <= MOST_DIFFERENCE}
        print(f"{backend} in batches of {batch}: largest difference {max(differences.values()):.2e} nats; {wrong}")
        passed += len(truth) - len(wrong)
        failed += len(wrong)
    line = f"lm-eval: {passed} passed, {failed} failed, 0 excluded"
    print(line)
    with Path(counts).open("a") as file:
        file.write(line + "\n")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
