#!/usr/bin/env bash
# All checks and measurements of the CUDA path, on a machine with an NVIDIA GPU, in three calls of less than ten minutes each:
#
#     bash benchmarks/gpu.sh figures OUT_FOLDER
#     bash benchmarks/gpu.sh tests OUT_FOLDER
#     bash benchmarks/gpu.sh again OUT_FOLDER
#
# See benchmarks/gpu.md, and `--help`. Runs from the sources: nothing has to be installed but what pyproject.toml names, pytest
# and hypothesis, and nothing is downloaded. PYTHON=python3 is the interpreter.
set -euo pipefail

if [[ ${2:-} && ${2:-} != -* ]]; then # before the folder changes
    set -- "$1" "$(realpath -m "$2")" "${@:3}"
fi
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.calls "$@"
