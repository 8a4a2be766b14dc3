#!/usr/bin/env bash
# All checks and measurements of the CUDA path in one go, in under ten minutes, on a machine with an NVIDIA GPU:
#
#     bash benchmarks/gpu.sh OUT_FOLDER
#
# Runs from the sources: nothing has to be installed but what pyproject.toml names, pytest and hypothesis. Each stage has a
# time limit of its own and goes on without those before it. OUT_FOLDER gets the logs and the figures; the table of targets
# is printed last.
#
# FLASH_ATTN_SDIST=FILE   a source package of flash-attn: it is built meanwhile, and used by the stages that begin after that.
#                         The build is halted while the engine is timed, whose Python it would slow down.
# PYTHON=python3          the interpreter.
set -uo pipefail

out=${1:?usage: bash benchmarks/gpu.sh OUT_FOLDER}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
began=$SECONDS

packages=$(mktemp -d)
export PYTHONPATH=$PWD:$packages PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" - >"$out/machine.txt" <<'PYTHON' || { echo "no NVIDIA GPU that torch can use: see $out/machine.txt" >&2; exit 2; }
import os, platform, sys
import torch, transformers
print("python", platform.python_version(), "| torch", torch.__version__, "| CUDA", torch.version.cuda, "| transformers", transformers.__version__)
print("cores", len(os.sched_getaffinity(0)))
if not torch.cuda.is_available():
    sys.exit("torch sees no GPU")
import triton
free, total = torch.cuda.mem_get_info()
print("triton", triton.__version__, "|", torch.cuda.get_device_name(), torch.cuda.get_device_capability(), f"| {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
PYTHON
{ command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv; } >>"$out/machine.txt" 2>&1
cat "$out/machine.txt"

# ---- flash-attn, in a process group of its own, so that all of its compilers can be halted

build=
if [[ -f ${FLASH_ATTN_SDIST:-} ]]; then
    export FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=90 MAX_JOBS=16 NVCC_THREADS=1
    setsid nice -n 19 "$python" -m pip install --no-index --no-deps --no-build-isolation --target "$packages" \
        "$FLASH_ATTN_SDIST" >"$out/flash_attn.log" 2>&1 &
    build=$!
    echo "building $FLASH_ATTN_SDIST ..."
fi

to_build() { # to_build STOP | CONT | TERM
    if [[ -n $build ]] && kill -0 "$build" 2>/dev/null; then kill -s "$1" -- "-$build"; fi
}

finish() {
    to_build CONT
    to_build TERM
    rm -rf "$packages"
}
trap finish EXIT

# ---- stages

declare -a ends=()

stage() { # stage NAME SECONDS COMMAND...: one stage, its output in NAME.log. It is interrupted first, to save what it has.
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    echo "== $name (at most $limit s)"
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    [[ $code == 124 || $code == 137 ]] && echo "stopped after $limit s" >>"$out/$name.log"
    ends+=("$(printf '%-8s %4d s, exit %d: %s' "$name" $((SECONDS - start)) "$code" "$(summary "$name")")")
    echo "${ends[-1]}"
}

summary() { # the last line of a log that is prose
    grep -vE '^\s*$|^[{}]' "$out/$1.log" | tail -n 1 | cut -c1-160
}

# Kernels are compiled by the CPU: side by side where pytest can do that. The engine's tests want the GPU to themselves.
parallel=()
"$python" -c 'import xdist' 2>/dev/null && parallel=(-n 8)
triton_tests=(tests/kernels/triton tests/kernels/test_triton_kernels.py tests/attention/test_triton.py)
quiet=(-p no:cacheprovider --tb=short -rfEs)

stage triton 65 "$python" -m pytest "${quiet[@]}" "${parallel[@]}" "${triton_tests[@]}"
stage tests 110 "$python" -m pytest "${quiet[@]}" -v --durations=10 tests/gpu
stage kernels 80 "$python" -m benchmarks.gpu.kernels --save "$out/kernels.json"
to_build STOP
stage engine 275 "$python" -m benchmarks.gpu.engine --random-weights qwen3-0.6b --option max_model_len=4096 --save "$out/engine.json"

# ---- the results, shortest last

for log in triton tests; do
    grep -E '^(FAILED|ERROR)' "$out/$log.log" | cut -c1-200 | head -n 20
done
for log in kernels engine; do
    grep '^warning:' "$out/$log.log" | cut -c1-300
done
echo
echo "in all $((SECONDS - began)) s"
printf '%s\n' "${ends[@]}"
echo
"$python" -m benchmarks.gpu.targets "$out/kernels.json" "$out/engine.json"
