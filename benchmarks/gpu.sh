#!/usr/bin/env bash
# Run the GPU tests and the benchmarks on whatever GPU is there, step by step.
#
#   OUT=DIR benchmarks/gpu.sh [STEP ...]     the steps named, in this order; default: all, by value
#   benchmarks/gpu.sh --list                 their names
#
# A step takes at most LIMIT seconds (240) and is then stopped. Two files in $OUT (default benchmarks/results) are written
# again after each step: gpu-<date>.json (status of each step, every figure measured so far) and gpu-<date>.tar.gz (logs).
# Goes on after a failure and exits with 1 if anything failed. PYTHON= names the interpreter (default: .venv/bin/python if
# it is there); ROUNDS= how many steps of training are timed.
set -uo pipefail
cd "$(dirname "$0")/.."

steps=(ceilings tests train-1.3B-engine train-1.3B-compile train-6.9B-engine train-1.3B-compile-fp8 train-6.9B-compile
       train-6.9B-compile-fp8 fp8-loss-160M generate-1.3B
       train-1.3B train-1.3B-compile-cudnn train-1.3B-engine-recompute train-1.3B-fused generate-410M
       generate-410M-steps memory)
if [ "${1:-}" = --list ]; then
    printf '%s\n' "${steps[@]}"
    exit
fi
python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
rounds=${ROUNDS:-5}
limit=${LIMIT:-240}
for step in "$@"; do
    case " ${steps[*]} " in
        *" $step "*) ;;
        *) echo "error: no step $step; the steps are: ${steps[*]}" >&2; exit 2 ;;
    esac
done
[ $# -eq 0 ] || steps=("$@")
results=${OUT:-benchmarks/results}/gpu-$(date +%F)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that torch ($python) can use: nothing was run" >&2
    exit 1
fi
{
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv || true
    "$python" -c 'import torch, triton; print("torch", torch.__version__, "cuda", torch.version.cuda, "triton", triton.__version__)'
} 2>&1 | tee "$work/machine.log"

# command STEP: set `command` to what a step runs.
command_of() {
    local step=$1 shape bench
    shape=$(cut -d- -f2 <<<"$step")
    bench=("$python" benchmarks/train.py --shape "$shape" --rounds "$rounds" --json "$work/$step.json")
    case $step in
        ceilings) command=("$python" benchmarks/ceilings.py --seconds 2 --json "$work/ceilings.json") ;;
        tests) command=("$python" -m pytest tests/gpu -q) ;;
        train-*-engine) command=("${bench[@]}" --sides neox) ;;
        train-*-compile-fp8) command=("${bench[@]}" --compile --fp8 tensorwise) ;;
        fp8-loss-160M) command=("$python" benchmarks/fp8_loss.py --json "$work/$step.json") ;;
        train-*-engine-recompute) command=("${bench[@]}" --sides neox --recompute) ;;
        train-*-compile) command=("${bench[@]}" --compile) ;;
        train-*-compile-cudnn) command=("${bench[@]}" --compile --cudnn) ;;
        train-*-fused) command=("${bench[@]}" --attention fused --micro-batch 4) ;;
        train-*) command=("${bench[@]}") ;;
        generate-410M) command=("$python" benchmarks/generate.py --dtype bf16 --layers 24 --hidden 1024 --heads 16 --vocab 50304 --json) ;;
        generate-1.3B) command=("$python" benchmarks/generate.py --dtype bf16 --layers 16 --hidden 2048 --heads 16 --vocab 50304 --json) ;;
        generate-410M-steps) command=("$python" benchmarks/generate.py --dtype bf16 --layers 24 --hidden 1024 --heads 16 --vocab 50304 --one-by-one --json) ;;
        memory) command=("$python" benchmarks/memory_table.py "$work") ;;
    esac
}

failed=0
for step in "${steps[@]}"; do
    command_of "$step"
    echo "== $step: ${command[*]}"
    started=$SECONDS
    PYTHONUNBUFFERED=1 PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
        timeout --kill-after=10 "$limit" "${command[@]}" 2>&1 | tee "$work/$step.log"
    code=${PIPESTATUS[0]}
    case $code in
        0) status=passed ;;
        124 | 137) status="stopped after $limit s"; failed=1 ;;
        *) if grep -q '^skipped:' "$work/$step.log"; then status=skipped; else status="failed with exit code $code"; failed=1; fi ;;
    esac
    echo "== $step: $status, $((SECONDS - started)) s"
    printf '%s\t%s\t%s\n' "$step" "$status" "$((SECONDS - started))" >>"$work/steps.tsv"
    "$python" benchmarks/collect.py "$work" "$results" || failed=1
done
echo "results: $results.json, $results.tar.gz"
exit "$failed"
