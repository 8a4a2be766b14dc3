#!/usr/bin/env bash
# The CUDA path, checked and measured on a machine with an NVIDIA GPU, in two calls:
#
#     bash benchmarks/gpu.sh choose OUT    # at most 620 s: checks, measures and chooses the variants for this GPU, then the engine
#     bash benchmarks/gpu.sh tests OUT     # at most 320 s: everything in tests/gpu, the Triton kernels' tests, a memory checker
#
# The same call again goes on where it stopped: what is done stands in OUT/done.txt. Nothing is downloaded or installed; see
# benchmarks/gpu.md. PYTHON=python3 is the interpreter. WHEELS=FOLDER holds packages that the machine has not (flash-attn 4 and what it
# needs), as wheels or as `pip install --target` leaves them; all goes on without. MINIATURE=1 runs `choose` in sizes for a CPU, without a
# GPU.
set -uo pipefail
usage="usage: gpu.sh choose|tests OUT_FOLDER"
call=${1:?$usage} out=$(realpath -m "${2:?$usage}") python=${PYTHON:-python3}
wheels=${WHEELS:+$(realpath -m "$WHEELS")}
cd "$(dirname "$0")/.." && mkdir -p "$out/tuning" || exit 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/nanoengine-triton}
keep_defaults="
import torch
from nanoengine.kernels.triton.tuning import DEFAULTS
if torch.cuda.is_available():
    DEFAULTS.save(torch.cuda.get_device_name())
"
short_run="
from nanoengine import LLM, SamplingParams
llm = LLM('demo', dtype='bfloat16', enforce_eager=True, max_model_len=128, num_kv_blocks=32, use_tqdm=False)
params = [SamplingParams(max_tokens=5, top_p=0.9 + 0.1 * i, temperature=0.8 * i, seed=i) for i in range(2)]
print([output.outputs[0].token_ids for output in llm.generate(['To be', 'Whether'], params, use_tqdm=False)])
"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ $wheels ]]; then
    if compgen -G "$wheels/*.whl" >/dev/null; then
        "$python" -m pip install --quiet --no-index --no-deps --target "$work/site" "$wheels"/*.whl
        wheels=$work/site
    fi
    PYTHONPATH+=:$wheels:$wheels/nvidia_cutlass_dsl/dsl_packages # Python reads no .pth file there
fi

stage() { # NAME SECONDS COMMAND...: its log goes to OUT/logs.txt, what it saves as $work/NAME.json to a line of OUT/figures.tsv, and
    # its last words, with what must not be overlooked, to OUT/table.txt
    local name=$1 seconds=$2 began=$SECONDS state log=$work/$1.log saved=$work/$1.json
    shift 2
    if grep -qx "$name" "$out/done.txt" 2>/dev/null; then echo "$name: done before"; return; fi
    timeout -s INT -k 10 "$seconds" "$@" >"$log" 2>&1
    state=$?
    if ((state == 0)); then echo "$name" >>"$out/done.txt"; fi
    if [[ -s $saved ]]; then printf '%s\t%s\n' "$name" "$(tr -d '\n' <"$saved")" >>"$out/figures.tsv"; fi
    { echo "==== $name"; tail -c 400000 "$log"; } >>"$out/logs.txt"
    { echo "$name: exit $state after $((SECONDS - began)) s: $(grep -aE '^[^{]*[^{ ]' "$log" | tail -n 1 | cut -c 1-160)"
      grep -aE '^(FAILED|ERROR |warning: |kept: )' "$log" | cut -c 1-200 | head -n 40; } | tee -a "$out/table.txt"
    return "$state"
}
tests() { stage "$1" "$2" "$python" -m pytest -p no:cacheprovider --tb=short -rfEs --durations=5 "${@:3}"; }
engine() { NANOENGINE_TUNING=$2 stage "$1" "$3" "$python" -m benchmarks.gpu.engine "${model[@]}" --save "$work/$1.json" --parts "${@:4}"; }

choose=(-m benchmarks.gpu.choose --tuning "$out/tuning" --save "$work/choose.json")
peers=()
model=(--model "$work/model" --option tokenizer=demo --option max_model_len=4096)
processes=14
if [[ ${MINIATURE:-} ]]; then # the interpreter is slow: everything once, as small as it can be
    choose+=(--device cpu --dtype float32 --shape tiny --quantized-shape tiny --sizes 2 int8-2 --scale 40 --repeat 1 --replays 2 --most-moves 4
        --prompts 9 --draws 1)
    model=(--device cpu --dtype float32 --model demo --option num_kv_blocks=60 --stream-len 8 3 --repeat 1 --num-seqs 2
        --input-len 3 9 --output-len 2 4 --decode-len 4 --decode-steps 2)
    peers=(--device cpu --shape tiny --stream-len 8 3 --repeat 1)
    processes=1
    export TRITON_INTERPRET=1
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no NVIDIA GPU" >&2
    exit 2
else
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.used --format=csv | tee -a "$out/table.txt"
fi

case $call in
choose)
    if [[ ! ${MINIATURE:-} ]]; then "$python" -m benchmarks.random_weights qwen3-0.6b "$work/model" 2>"$work/model.log" & fi
    stage warm 70 bash -c 'for ((i = 0; i < $1; i++)); do "${@:2}" --warm $i $1 & done; wait' warm "$processes" "$python" "${choose[@]}"
    stage choose 280 "$python" "${choose[@]}" || exit # nothing that follows would mean anything
    wait
    NANOENGINE_TUNING=$work/default "$python" -c "$keep_defaults"
    engine before "$work/default" 45 "one stream" workload
    engine after "$out/tuning" 70 "equal tokens" "one stream" workload decode start-up
    engine int8kv "$out/tuning" 45 workload --option kv_cache_dtype=int8
    stage peers 110 "$python" -m benchmarks.gpu.peers "${peers[@]}" --save "$work/peers.json"
    "$python" -m benchmarks.gpu.table "$out/figures.tsv" | tee -a "$out/table.txt"
    ;;
tests) # side by side but for those that measure the card's memory; each file in a process of its own, which an illegal access would poison
    for file in tests/gpu/test_*.py; do
        name=$(basename "$file" .py)
        workers=0
        case $name in test_memory_on_gpu) continue ;; test_hybrids_on_gpu | test_packed_gemv_on_gpu) workers=4 ;; esac
        tests "$name" 150 "$file" -n "$workers" --dist worksteal -k "not states_are_counted" &
    done
    tests triton 150 -n 6 --dist worksteal tests/kernels/triton tests/kernels/test_{contract,sampling}.py tests/models/test_architectures_in_triton.py &
    wait
    tests memory 90 tests/gpu/test_memory_on_gpu.py
    tests memory_of_states 40 tests/gpu/test_hybrids_on_gpu.py -k states_are_counted
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 stage memcheck 40 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -c "$short_run"
    ;;
*) echo "$usage" >&2; exit 2 ;;
esac
