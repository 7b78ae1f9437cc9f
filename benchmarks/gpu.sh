#!/usr/bin/env bash
# Run the GPU tests and the training and generation benchmarks on whatever GPU is there.
#
#   OUT=DIR benchmarks/gpu.sh [SHAPE ...]       shapes: 1.3B 2.8B 6.9B (default: 1.3B 6.9B)
#
# Writes a log and, for each benchmark, a JSON file to $OUT (default benchmarks/results/<date>-gpu). Goes on after a
# failure and exits with 1 if anything failed. A shape that does not fit the GPU's memory is skipped with the reason.
# PYTHON= names the interpreter (default: .venv/bin/python if it is there); ROUNDS= how many steps are timed.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
out=${OUT:-benchmarks/results/$(date +%F)-gpu}
rounds=${ROUNDS:-5}
shapes=("$@")
[ ${#shapes[@]} -gt 0 ] || shapes=(1.3B 6.9B)
mkdir -p "$out" || exit 1
failed=0

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that torch ($python) can use: nothing was run" | tee "$out/gpu.log" >&2
    exit 1
fi
{
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv || true
    "$python" -c 'import torch, triton; print("torch", torch.__version__, "cuda", torch.version.cuda, "triton", triton.__version__)'
} 2>&1 | tee "$out/gpu.log"

# run NAME COMMAND...: show and log a command; a failure is noted and the next one goes on.
run() {
    local name=$1 code
    shift
    echo "== $name: $*" | tee -a "$out/gpu.log"
    PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
        "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    if [ "$code" -ne 0 ]; then
        if grep -q '^skipped:' "$out/$name.log"; then
            echo "== $name: skipped" | tee -a "$out/gpu.log"
        else
            echo "== $name: FAILED with exit code $code" | tee -a "$out/gpu.log"
            failed=1
        fi
    fi
}

run tests "$python" -m pytest tests -m gpu -q
for shape in "${shapes[@]}"; do
    bench=("$python" benchmarks/train.py --shape "$shape" --rounds "$rounds")
    run "train-$shape" "${bench[@]}" --json "$out/train-$shape.json"
    run "train-$shape-compile" "${bench[@]}" --compile --json "$out/train-$shape-compile.json"
    run "train-$shape-compile-cudnn" "${bench[@]}" --compile --cudnn --json "$out/train-$shape-compile-cudnn.json"
done
# The engine as a user gets it, alone in its process: its speed, and its peak memory beside what the plan predicts.
run train-1.3B-engine "$python" benchmarks/train.py --shape 1.3B --sides neox --rounds "$rounds" \
    --json "$out/train-1.3B-engine.json"
run train-1.3B-engine-recompute "$python" benchmarks/train.py --shape 1.3B --sides neox --recompute --rounds "$rounds" \
    --json "$out/train-1.3B-engine-recompute.json"
run train-1.3B-fused "$python" benchmarks/train.py --shape 1.3B --attention fused --micro-batch 4 --rounds "$rounds" \
    --json "$out/train-1.3B-fused.json"
# Generation against transformers and the memory's bound; one JSON object a line, in the log.
run generate-410M "$python" benchmarks/generate.py --dtype bf16 --layers 24 --hidden 1024 --heads 16 --vocab 50304 --json
run generate-1.3B "$python" benchmarks/generate.py --dtype bf16 --layers 16 --hidden 2048 --heads 16 --vocab 50304 --json
run memory "$python" benchmarks/memory_table.py "$out"
echo "results: $out"
exit "$failed"
