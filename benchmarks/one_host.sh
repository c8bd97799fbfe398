#!/usr/bin/env bash
# Runs the GPU benchmarks and tests of a host side by side: each argument is the jobs of one GPU, which get that GPU
# and an equal share of the host's cores, one job after another.
#
#   benchmarks/one_host.sh results "row vit_large" "row gpt2_large lossy" "tests + captures + launch" "input + numerics"
#
# Jobs: `row NAME [lossy|exact [TUNE_MINUTES ROW_MINUTES]]` of single_gpu.py, `launch [WORKLOAD [MINUTES]]`,
# `input [WORKLOAD [MINUTES]]`, `script NAME [SECONDS]` of front_door.py,
# `kernels ROW MINUTES` of kernels_studies.py, `numerics [MODELS]`, `captures`, `tests` (those marked gpu).
# Writes results/GPU/ (one JSON line a result, logs), and packs the folder into results.tgz every 15 seconds, so that
# a sitting that is cut off leaves what it had. Where there is a .wheelhouse, `make offline-install` comes first.
# TUNE_MINUTES and ROW_MINUTES limit a row, LIMIT_S all of it.
set -uo pipefail
cd "$(dirname "$0")/.."

results=$1
shift
tune_minutes=${TUNE_MINUTES:-6} row_minutes=${ROW_MINUTES:-9.5} limit_s=${LIMIT_S:-1000000}
cores=$(($(nproc) / $#))
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p "$results"
if [ -d .wheelhouse ]; then make offline-install; fi

job() { # GPU, then the words of a job
  local out="$results/$1"
  case $2 in
    row)
      local allow=()
      if [ "${4:-}" = lossy ]; then allow=(--allow lossy); fi
      python3 benchmarks/single_gpu.py --only "$3" "${allow[@]}" --tune-minutes "${5:-$tune_minutes}" \
        --minutes "${6:-$row_minutes}" --trials "$out" --out "$out/single_gpu.jsonl"
      ;;
    launch) python3 benchmarks/launch_bound.py ${3:+--only "$3"} ${4:+--minutes "$4"} --trials "$out" --out "$out/launch_bound.jsonl" ;;
    input) python3 benchmarks/input_bound.py ${3:+--only "$3"} ${4:+--minutes "$4"} --trials "$out" --out "$out/input_bound.jsonl" ;;
    script) python3 benchmarks/front_door.py --gpu --only "$3" --seconds "${4:-360}" --out "$out/front_door.jsonl" ;;
    kernels) python3 benchmarks/kernels_studies.py --only "$3" --minutes "$4" --trials "$out" --out "$out/kernels_studies.jsonl" ;;
    numerics) python3 benchmarks/numerics.py ${3:+--only "${@:3}"} --out "$out/numerics.json" ;;
    captures) python3 benchmarks/capture_traces.py --out "$out/captures" ;;
    tests) make gpu-test GPU_JOBS="${GPU_JOBS:-4}" ;;
    *) echo "unknown job: ${*:2}" && return 2 ;;
  esac
}

jobs_of() { # GPU, its jobs
  local gpu=$1 started words
  export CUDA_VISIBLE_DEVICES=$gpu
  mkdir -p "$results/$gpu"
  tr '+' '\n' <<<"$2" | while read -r -a words; do
    started=$SECONDS
    job "$gpu" "${words[@]}" </dev/null >"$results/$gpu/${words[0]}${words[1]:+-${words[1]}}.log" 2>&1
    echo "GPU $gpu: ${words[*]}: exit $?, $((SECONDS - started)) s"
  done
}

export -f job jobs_of
export results tune_minutes row_minutes
pack() { tar -czf "$results.tmp" -C "$results" . && mv "$results.tmp" "$results.tgz"; }

for gpu in $(seq 0 $(($# - 1))); do
  first=$((gpu * cores))
  timeout -k 5 "$limit_s" taskset -c "$first-$((first + cores - 1))" \
    bash -c 'jobs_of "$0" "$1"' "$gpu" "${@:$((gpu + 1)):1}" &
done
while [ -n "$(jobs -pr)" ]; do
  sleep 15
  pack 2>/dev/null
done
pack
tail -n 4 "$results"/*/*.log
