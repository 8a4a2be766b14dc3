"""The process of the `nanoengine` command, or `python -m nanoengine`. It shows no traceback, with any kind of terminal."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper


def main() -> int:
    """Run the command; returns the exit status."""
    open_streams()
    may_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if may_interrupt:  # while modules are imported, Ctrl-C ends the process at once: nothing must be cleaned up
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from nanoengine.serve.cli import main as run

    status = 130
    try:
        if may_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
    except KeyboardInterrupt:  # a second one, while the first was reported
        pass
    finally:
        if may_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # not while the interpreter ends
    return status


def open_streams() -> None:
    """Open closed standard streams, and let standard output write every character.

    Where one was closed (`2>&-`), Python has None for it, and the next file to be opened would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
