"""Fill in the middle: how many of twenty holes in small Python files a model fills so that the file's own assertions hold, and
how long an editor waits for the first token while somebody types, with the prefix cache and without.

    python -m benchmarks.infill MODEL
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from nanoengine import LLM, SamplingParams
from nanoengine.models.fill_in_middle import FillMarks, fill_marks

HOLES = (
    ("def add(a, b):\n    return ", "\n\n\nassert add(1, 2) == 3\n"),
    ("def is_even(n):\n    return ", "\n\n\nassert is_even(4) and not is_even(3)\n"),
    ("def area(width, height):\n    ", "\n    return result\n\n\nassert area(3, 4) == 12\n"),
    ("def fib(n):\n    if n < 2:\n        return n\n    return ", "\n\n\nassert fib(10) == 55\n"),
    (
        "def largest(values):\n    best = values[0]\n    for value in values:\n        ",
        "\n    return best\n\n\nassert largest([3, 9, 2]) == 9\n",
    ),
    (
        "def count_vowels(text):\n    count = 0\n    for letter in text:\n        if ",
        ":\n            count += 1\n    return count\n\n\nassert count_vowels('banana') == 3\n",
    ),
    (
        "import ",
        "\n\n\ndef circle(radius):\n    return math.pi * radius ** 2\n\n\nassert round(circle(1), 2) == 3.14\n",
    ),
    ("def reverse(text):\n    return ", "\n\n\nassert reverse('abc') == 'cba'\n"),
    (
        "def factorial(n):\n    result = 1\n    for i in ",
        ":\n        result *= i\n    return result\n\n\nassert factorial(5) == 120\n",
    ),
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
        "\n\n    def pop(self):\n        return self.items.pop()\n\n\nstack = Stack()\nstack.push(1)\nassert stack.pop() == 1\n",
    ),
    (
        "class Stack:\n    def __init__(self):\n        ",
        "\n\n    def push(self, item):\n        self.items.append(item)\n\n\ns = Stack()\ns.push(1)\nassert s.items == [1]\n",
    ),
    ("def squares(n):\n    return [", " for i in range(n)]\n\n\nassert squares(4) == [0, 1, 4, 9]\n"),
    (
        "def word_counts(text):\n    counts = {}\n    for word in text.split():\n        ",
        "\n    return counts\n\n\nassert word_counts('a b a') == {'a': 2, 'b': 1}\n",
    ),
    (
        "def safe_divide(a, b):\n    try:\n        return a / b\n    except ",
        ":\n        return None\n\n\nassert safe_divide(1, 0) is None\n",
    ),
    (
        "def first_line(path):\n    with ",
        " as file:\n        return file.readline()\n\n\nassert first_line(__file__).startswith('def')\n",
    ),
    ("def clamp(value, low, high):\n    return ", "\n\n\nassert clamp(5, 0, 3) == 3 and clamp(-1, 0, 3) == 0\n"),
    (
        "def is_palindrome(text):\n    text = text.lower()\n    return ",
        "\n\n\nassert is_palindrome('Anna') and not is_palindrome('Ann')\n",
    ),
    ("def celsius(fahrenheit):\n    return ", "\n\n\nassert round(celsius(212)) == 100\n"),
    (
        "from collections import ",
        "\n\n\ndef most(words):\n    return Counter(words).most_common(1)[0][0]\n\n\nassert most(['a', 'b', 'a']) == 'a'\n",
    ),
    (
        "def flatten(lists):\n    flat = []\n    for own in lists:\n        ",
        "\n    return flat\n\n\nassert flatten([[1], [2, 3]]) == [1, 2, 3]\n",
    ),
)
"""The texts before and behind each hole."""


def trimmed(middle: str, suffix: str) -> str:
    """A middle as editors insert it: without a repetition of what stands behind the hole, from its first line on."""
    lines = [line for line in suffix.splitlines() if line.strip()]
    ends = [at for line in lines[:1] if (at := middle.find(line)) >= 0]
    return middle[: min(ends)].rstrip() if ends else middle


def is_right(text: str) -> bool:
    """Whether a file runs, its assertions included."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "filled.py")
        file.write_text(text)
        try:
            run = subprocess.run([sys.executable, "-I", str(file)], capture_output=True, timeout=10, check=False)
        except subprocess.TimeoutExpired:
            return False
        return run.returncode == 0


def typing_seconds(llm: LLM, marks: FillMarks) -> float:
    """The median time to the first token behind each letter that is typed below 100 lines of a file and above 20 others."""
    lines = Path(__file__).read_text().splitlines(keepends=True) * 3
    prefix, suffix, typed = "".join(lines[:100]), "".join(lines[100:120]), "def middle_of(before, behind):\n    return "
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seconds = []
    for end in range(20):
        start = time.perf_counter()
        llm.generate([marks.prompt(prefix + typed[:end], suffix)], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main(model: str) -> None:
    for caching in (True, False):
        with LLM(model, max_model_len=8192, enable_prefix_caching=caching) as llm:
            marks = fill_marks(llm.tokenizer)
            print(f"first token while typing, prefix cache {caching}: {typing_seconds(llm, marks) * 1000:.0f} ms")
            if not caching:
                continue
            params = SamplingParams(temperature=0, max_tokens=48, stop_token_ids=marks.ends)
            outputs = llm.generate([marks.prompt(*hole) for hole in HOLES], params, use_tqdm=False)
            middles = [output.outputs[0].text for output in outputs]
            whole = sum(
                is_right(before + middle + behind) for middle, (before, behind) in zip(middles, HOLES, strict=True)
            )
            cut = sum(is_right(p + trimmed(middle, s) + s) for middle, (p, s) in zip(middles, HOLES, strict=True))
            print(f"holes filled right: {whole} of {len(HOLES)} as written, {cut} as editors insert them")


if __name__ == "__main__":
    main(*sys.argv[1:])
