#!/usr/bin/env bash
# Run the GPU tests and the benchmarks on whatever GPU is there, step by step.
#
#   OUT=DIR benchmarks/gpu.sh [STEP ...]     the steps named, in this order; default: all, by value
#   benchmarks/gpu.sh --list                 their names
#   benchmarks/gpu.sh --rehearse [STEP ...]  the same commands on a CPU with tiny networks: whether they run at all
#
# A step takes at most LIMIT seconds (240) and is then stopped. Two files in $OUT (default benchmarks/results) are written
# again after each step and every 30 seconds: gpu-<date>.json (status of each step, every figure measured so far) and
# gpu-<date>.tar.gz (logs). A signal stops the step under way, and what it measured is kept. Goes on after a failure and
# exits with 1 if anything failed. PYTHON= names the interpreter (default: .venv/bin/python if it is there); ROUNDS= how
# many steps of training are timed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

steps=(ceilings tests train-1.3B-engine train-1.3B-compile train-6.9B-engine train-1.3B-compile-fp8 train-6.9B-compile
       train-6.9B-compile-fp8 fp8-loss-160M deterministic-160M generate-1.3B train-1.3B train-1.3B-engine-eager train-1.3B-compile-cudnn
       train-1.3B-engine-recompute train-1.3B-fused train-1.3B-16x-compile train-1.3B-16x-engine generate-410M generate-410M-steps
       longest-1.3B longest-8B speed-1.3B-8k speed-1.3B-32k speed-1.3B-128k recurrent-kernels flex-documents
       attention-kernels async-save inputs-in-cpu memory)
rehearse=
if [ "${1:-}" = --list ]; then
    printf '%s\n' "${steps[@]}"
    exit
elif [ "${1:-}" = --rehearse ]; then
    rehearse=1
    shift
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
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # the checkout need not be installed
export PYTHONUNBUFFERED=1 PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

if [ -n "$rehearse" ]; then
    export CUDA_VISIBLE_DEVICES=
elif ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU that torch ($python) can use: nothing was run" >&2
    exit 1
fi
{
    nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv || true
    "$python" -c 'import torch, triton; print("torch", torch.__version__, "cuda", torch.version.cuda, "triton", triton.__version__)'
} 2>&1 | tee "$work/machine.log"

# command_of STEP: set `command` to what a step runs.
command_of() {
    local step=$1 shape dtype=bf16 bench generate long
    shape=$(cut -d- -f2 <<<"$step")
    case $step in *-16x-*) shape+=-16x ;; esac # 16 experts
    generate=("$python" benchmarks/generate.py --dtype bf16 --json)
    case $step in
        generate-410M*) generate+=(--layers 24 --hidden 1024 --heads 16 --vocab 50304) ;;
        generate-1.3B) generate+=(--layers 24 --hidden 2048 --heads 16 --vocab 50304) ;;
    esac
    if [ -n "$rehearse" ]; then
        shape=tiny
        case $step in *-16x-*) shape=tiny-16x ;; esac
        rounds=1 dtype=fp32 # torch 2.13 compiles no bf16 block of this size for CPUs
        generate=("$python" benchmarks/generate.py --json --layers 2 --hidden 64 --heads 4 --vocab 512 --new 8 --rounds 1)
    fi
    bench=("$python" benchmarks/train.py --shape "$shape" --rounds "$rounds" --dtype "$dtype" --json "$work/$step.json")
    long=("$python" benchmarks/long_context.py "${step%%-*}" --shape "$shape" --json "$work/$step.json")
    case $step in # long samples, which a rehearsal shortens
        longest-8B) long+=(--in-main-memory) ;;
        speed-*-8k) long+=(--tokens 8192) ;;
        speed-*-32k) long+=(--tokens 32768) ;;
        speed-*-128k) long+=(--tokens 131072 --rounds 1) ;;
    esac
    [ -z "$rehearse" ] || long+=(--tokens 256 --window 64 --most 512 --rounds 1)
    case $step in
        ceilings) command=("$python" benchmarks/ceilings.py --seconds 2 --json "$work/ceilings.json" ${rehearse:+--shape tiny}) ;;
        tests) command=("$python" -m pytest tests/gpu -v --tb=short --durations=15) ;;
        train-*-engine) command=("${bench[@]}" --sides neox --compile) ;;
        train-*-engine-eager) command=("${bench[@]}" --sides neox) ;;
        train-*-engine-recompute) command=("${bench[@]}" --sides neox --compile --recompute) ;;
        train-*-compile-fp8) command=("${bench[@]}" --sides model --compile --fp8 tensorwise) ;;
        fp8-loss-160M)
            command=("$python" benchmarks/fp8_loss.py --json "$work/$step.json")
            [ -z "$rehearse" ] || command+=(--layers 1 --hidden 64 --heads 4 --seq 64 --micro-batch 2 --steps 2)
            ;;
        deterministic-160M)
            command=("$python" benchmarks/deterministic.py --json "$work/$step.json")
            [ -z "$rehearse" ] || command+=(--layers 1 --hidden 64 --heads 4 --seq 64 --micro-batch 2 --steps 3)
            ;;
        train-*-compile) command=("${bench[@]}" --sides model --compile) ;;
        train-*-compile-cudnn) command=("${bench[@]}" --sides model --compile --cudnn) ;;
        train-*-fused) command=("${bench[@]}" --sides model --attention fused --micro-batch 4) ;;
        train-*) command=("${bench[@]}" --sides model) ;;
        generate-*-steps) command=("${generate[@]}" --one-by-one) ;;
        generate-*) command=("${generate[@]}") ;;
        flex-documents | attention-kernels | async-save | inputs-in-cpu)
            command=("$python" benchmarks/open_questions.py "$step" --json "$work/$step.json")
            [ -z "$rehearse" ] || command+=(--layers 1 --hidden 64 --heads 4 --seq 64 --micro-batch 2 --steps 2)
            ;;
        recurrent-kernels) command=("$python" benchmarks/recurrent_kernels.py --json "$work/$step.json") ;;
        longest-* | speed-*) command=("${long[@]}") ;;
        memory) command=("$python" benchmarks/memory_table.py "$work") ;;
    esac
}

# What has been measured so far, also by the step under way.
collect() {
    "$python" benchmarks/collect.py "$work" "$results" || failed=1
}

# ended STATUS: the step under way has ended.
ended() {
    echo "== $step: $1, $((SECONDS - started)) s"
    printf '%s\t%s\t%s\n' "$step" "$1" "$((SECONDS - started))" >>"$work/steps.tsv"
    rm -f "$work/running.tsv"
    collect
}

# A signal: stop the step, keep what it measured.
# shellcheck disable=SC2329 # called by the trap
stopped() {
    trap '' TERM INT HUP
    if [ -f "$work/running.tsv" ]; then
        kill -TERM "$child"
        wait "$child"
        ended "cut off"
    fi
    exit 143
}
trap stopped TERM INT HUP

failed=0
for step in "${steps[@]}"; do
    command_of "$step"
    echo "== $step: ${command[*]}"
    started=$SECONDS
    printf '%s\tcut off\t0\n' "$step" >"$work/running.tsv"
    : >"$work/$step.log"
    # pytest ends with its failures on SIGINT, which a shell's background processes would ignore
    env --default-signal=INT timeout --signal=INT --kill-after=10 "$limit" "${command[@]}" >"$work/$step.log" 2>&1 &
    child=$!
    tail -n +1 -f --pid="$child" "$work/$step.log" 2>/dev/null &
    shown=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 1
        (((SECONDS - started) % 30)) || collect
    done
    wait "$child"
    code=$?
    wait "$shown"
    case $code in
        0) status=passed ;;
        124 | 137) status="stopped after $limit s"; failed=1 ;;
        *) if grep -q '^skipped:' "$work/$step.log"; then status=skipped; else status="failed with exit code $code"; failed=1; fi ;;
    esac
    ended "$status"
done
echo "results: $results.json, $results.tar.gz"
exit "$failed"
