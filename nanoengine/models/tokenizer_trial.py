"""Tries a tokenizer.json in a process of its own before a server opens: one can make the library panic with every text, take all
memory, or have no end.

`python -I tokenizer_trial.py PACKAGES FILE` is that process. It imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

MAX_SECONDS, MAX_BYTES = 60, 4 << 30
"""Of a CPU and of memory, for all `TEXTS`; the largest vocabularies take a tenth of both."""

MAX_WAIT = 600.0
"""Seconds until the answer must be there, on however busy a machine."""

TEXTS = ("", "Hello, world! 12", " a\n\tb  ", "\ufb01 e\u0301 \u4e16\u754c \U0001f642 \u00a0", "a" * 1000 + "!")


def try_tokenizer(folder: Path) -> None:
    """Encode and decode texts with the tokenizer.json of a folder, if there is one.

    Raises:
        UnsupportedModel: some text makes the library panic, or it takes too much.
    """
    import tokenizers

    from nanoengine.core.errors import UnsupportedModel

    path = folder / "tokenizer.json"
    if not path.is_file():  # a GGUF file; or who reads the folder will say what is wrong
        return
    command = [sys.executable, "-I", __file__, str(Path(tokenizers.__file__).parents[1]), str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=MAX_WAIT, check=False)
    except subprocess.TimeoutExpired:
        why = f"it is not read after {MAX_WAIT:g} s"
    else:
        if done.returncode == 0:
            return
        why = f"it takes more than {MAX_BYTES >> 30} GiB, or ends the library"
        if done.returncode == -signal.SIGXCPU:
            why = f"it takes more than {MAX_SECONDS} s to read a few texts"
        elif done.returncode == 1:
            why = f"the library tokenizers panics: {done.stdout.decode(errors='replace').strip()[:300]}"
    raise UnsupportedModel(f"{path} is no tokenizer that can be used: {why}")


# ---- in the process


def try_texts(path: str) -> None:
    """Whatever is an Exception is no panic: it is the reader's, or the text's."""
    from tokenizers import Tokenizer  # found only now

    with contextlib.suppress(Exception):
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for text in TEXTS:
            for with_special_tokens in (False, True):
                with contextlib.suppress(Exception):
                    tokenizer.decode(tokenizer.encode(text, add_special_tokens=with_special_tokens).ids)
        tokenizer.decode(list(range(tokenizer.get_vocab_size())))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.append(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    try:
        try_texts(sys.argv[2])
    except BaseException as error:
        print(error, flush=True)
        os._exit(1)
