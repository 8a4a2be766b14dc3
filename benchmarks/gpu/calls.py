"""The three calls of gpu.sh, from the first look at the machine to the table that is printed last.

Each begins where the one before it, or an earlier try, has stopped. It imports no torch: whatever is wrong with that, or with the
GPU, is a line of text and not the end of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from benchmarks.gpu import archive
from benchmarks.gpu.changes import changes
from benchmarks.gpu.plans import CALLS, PYTHON, VITAL, stages_of
from benchmarks.gpu.stages import DONE, LEFT_OUT, Ledger, run_stages
from benchmarks.gpu.targets import lines
from benchmarks.report import align

MACHINE_SECONDS = 60
MACHINE = """
import os, platform, shutil, subprocess, sys, torch
print("python", platform.python_version(), "| torch", torch.__version__, "| CUDA", torch.version.cuda)
print("cores", len(os.sched_getaffinity(0)), flush=True)
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU")
import transformers, triton
print("triton", triton.__version__, "| transformers", transformers.__version__)
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), flush=True)
if shutil.which("nvidia-smi"):
    wanted = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used,memory.total"
    subprocess.run(["nvidia-smi", "--query-gpu=" + wanted, "--format=csv"])
"""


def main(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    out, began = args.out, monotonic()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ledger = Ledger(out)
    if not args.miniature and not _machine_is_fit(ledger):
        ledger.finish()
        return 2
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        _set_environment(out, Path(cache))
        stages = stages_of(args.call, ledger, miniature=args.miniature)
        unknown = sorted({*(args.redo or [])} - {stage.name for stage in stages})
        if unknown:
            sys.exit(f"{args.call} has no stage {', '.join(unknown)}: it has {', '.join(s.name for s in stages)}")
        redo = {stage.name for stage in stages} if args.redo == [] else {*(args.redo or [])}
        failed = None
        try:
            failed = run_stages(args.call, stages, ledger, redo)
        except KeyboardInterrupt:
            print("interrupted: what is done is kept")
        left_out = archive.pack(Path(cache), out / archive.NAME)
    ledger.finish()
    table = [*_table(args.call, ledger), f"in all {monotonic() - began:.0f} s"]
    if left_out:
        table.append(f"{left_out} compiled kernels had no room in {archive.NAME}")
    if failed is not None:
        table.append(
            f"STOPPED: {failed.name} failed, and {VITAL}: see the end of {ledger.logs.name}. Then the same call again"
        )
    (out / "table.txt").write_text("\n".join(table) + "\n")
    print(*table, sep="\n", flush=True)
    return int(failed is not None or not all(_is_well(ledger.state(args.call, stage.name)) for stage in stages))


def _machine_is_fit(ledger: Ledger) -> bool:
    """Whether torch sees a GPU; what is there is written down."""
    try:
        seen = subprocess.run(
            [PYTHON, "-c", MACHINE], capture_output=True, text=True, timeout=MACHINE_SECONDS, check=False
        )
        text, code = seen.stdout + seen.stderr, seen.returncode
    except subprocess.TimeoutExpired:
        text, code = f"torch has not come to its senses within {MACHINE_SECONDS} s", 1
    ledger.note("machine", text)
    print(text, end="", flush=True)
    if code:
        print(f"no NVIDIA GPU that torch can use: see {ledger.logs}", file=sys.stderr)
    return code == 0


def _set_environment(out: Path, cache: Path) -> None:
    """What all stages share: one cache of compiled kernels, and the sizes that were chosen for this GPU."""
    given = os.environ.get("TRITON_ARCHIVE")
    packed = Path(given) if given else out / archive.NAME
    if packed.exists():
        try:
            archive.unpack(packed, cache)
        except (OSError, EOFError, ValueError, tarfile.TarError) as error:
            print(f"{packed} cannot be unpacked, and kernels are compiled anew: {error}")
    os.environ |= {
        "TRITON_CACHE_DIR": str(cache),
        "NANOENGINE_TUNING": str(out / "tuning"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _table(call: str, ledger: Ledger) -> Iterator[str]:
    """How the stages ended, what must not be overlooked, the goals, and after mends what they have changed."""
    stages = ledger.calls.get(call, {})
    yield ""
    yield from align(
        [
            ["stage", "state", "seconds", "last words"],
            *([name, entry["state"], f"{entry['seconds']:.0f}", entry["words"]] for name, entry in stages.items()),
        ]
    )
    notes = [f"{name}: {note}" for name, entry in stages.items() for note in entry["notes"]]
    yield from ["", *notes] if notes else []
    order = ["again", "figures", "tests"] if call == "again" else ["figures", "tests"]
    yield from ["", *lines(list(ledger.reports(*order)))]
    if call == "again":
        yield from ["", *changes(ledger.reports("figures"), ledger.reports("again"))]


def _is_well(state: str | None) -> bool:
    return state in (DONE, LEFT_OUT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu.sh", description="Checks and measurements of the CUDA path; see gpu.md.")
    parser.add_argument("call", choices=CALLS)
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="folder for all results; it may hold those of earlier calls"
    )
    parser.add_argument("--redo", nargs="*", metavar="STAGE", help="run these though they are done; without names, all")
    parser.add_argument("--miniature", action="store_true", help="in sizes for a CPU, to try this script without a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
