#!/usr/bin/env bash
# Runs what needs several GPUs on a host of them: each argument is the jobs of a group of GPUs, which get these GPUs and an
# equal share of the host's cores, one job after another. Groups run side by side, with as many GPUs each.
#
#   benchmarks/many_gpus.sh results "row vit_large two lossy"                          # one group of all GPUs
#   benchmarks/many_gpus.sh results "row vit_large one + tests" "memory gpt2_xl"       # two groups of half of them
#   TOGETHER=1 benchmarks/many_gpus.sh results "memory gpt2_xl" "memory gpt2_large"    # two groups, all GPUs each
#
# Jobs: `row NAME [one|two|two_25gbit [exact|lossy [TUNE_MINUTES ROW_MINUTES]]]` of multi_gpu.py, `memory [NAME]` and `study
# [NAME]` of memory.py (on two GPUs), `tests [PATHS]` (those marked gpu), `links` (what NCCL says of this host).
# Writes results/GROUP/ (one JSON line a result, logs), and packs the folder into results.tgz every 15 seconds, so that a
# sitting that is cut off leaves what it had. Where there is a .wheelhouse, `make offline-install` comes first.
# TUNE_MINUTES and ROW_MINUTES limit a row (by default so that one fits into a command of 10 minutes), LIMIT_S all of it.
# TOGETHER=1 lets groups share all GPUs, for what is not timed. STEPTUNE_EMULATED_DEVICES=2 takes one GPU for two, which
# every group has, too. GPUS says how many there are, where there is no nvidia-smi. SMALL=1 tries it out without any
# GPU: small workloads over gloo.
set -uo pipefail
cd "$(dirname "$0")/.."

results=$1
shift
tune_minutes=${TUNE_MINUTES:-4.5} row_minutes=${ROW_MINUTES:-8.8} limit_s=${LIMIT_S:-1000000}
gpus=${STEPTUNE_EMULATED_DEVICES:-${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l)}}
groups_of_gpus=$#
if [ -n "${TOGETHER:-}${STEPTUNE_EMULATED_DEVICES:-}" ]; then groups_of_gpus=1; fi
per_group=$((gpus / groups_of_gpus))
cores=$(($(nproc) / $#))
small=()
if [ -n "${SMALL:-}" ]; then small=(--small --ranks 2 --foreign-load 1); fi
if [ "$cores" -lt 1 ]; then cores=1; fi
if [ -z "${SMALL:-}" ] && [ "$per_group" -lt 2 ]; then
  echo "$gpus GPUs are too few for $groups_of_gpus groups: every group needs two"
  exit 2
fi
# Multicast over NVLink can put GPUs that others share out of service; nothing here needs it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p "$results"
if [ -d .wheelhouse ]; then make offline-install; fi

job() { # group, then the words of a job
  local out="$results/$1" allow=() only=()
  case $2 in
    row)
      if [ "${5:-}" = lossy ]; then allow=(--allow lossy); fi
      python3 benchmarks/multi_gpu.py --only "$3" --network "${4:-one}" "${allow[@]}" "${small[@]}" \
        --tune-minutes "${6:-$tune_minutes}" --minutes "${7:-$row_minutes}" \
        --trials "$out/trials" --out "$out/multi_gpu.jsonl"
      ;;
    memory | study)
      if [ -n "${3:-}" ]; then only=(--only "$3"); fi
      if [ "$2" = study ]; then only+=(--study); fi
      python3 benchmarks/memory.py "${only[@]}" ${SMALL:+--small} --ranks 2 --minutes "$row_minutes" \
        --out "$out/memory.jsonl"
      ;;
    tests) python3 -m pytest -m gpu -p no:benchmark -p no:cacheprovider "${@:3}" ;;
    links) links ;;
    *) echo "unknown job: ${*:2}" && return 2 ;;
  esac
}

links() {
  nvidia-smi topo -m
  ip -o link
  tc -V || echo "no tc: nothing can be shaped here"
  # What NCCL sends over between two emulated hosts is in the log.
  local folder job='{"workload": "zoo:synthetic?batch=8", "choices": {}, "num_ranks": 2, "device": "cuda"}'
  folder=$(mktemp -d)
  export NCCL_DEBUG=INFO STEPTUNE_EMULATED_HOSTS=2
  timeout 60 python3 benchmarks/rank_peaks.py "$job" 0 "$folder" &
  timeout 60 python3 benchmarks/rank_peaks.py "$job" 1 "$folder"
  wait
  unset NCCL_DEBUG STEPTUNE_EMULATED_HOSTS
  cat "$folder"/*.json
}

jobs_of() { # group, its GPUs, its jobs
  local group=$1 started words
  if [ -z "${SMALL:-}${STEPTUNE_EMULATED_DEVICES:-}" ]; then export CUDA_VISIBLE_DEVICES=$2; fi
  mkdir -p "$results/$group"
  tr '+' '\n' <<<"$3" | while read -r -a words; do
    started=$SECONDS
    job "$group" "${words[@]}" </dev/null >"$results/$group/$(tr ' /' '--' <<<"${words[*]:0:4}").log" 2>&1
    echo "group $group: ${words[*]}: exit $?, $((SECONDS - started)) s"
  done
}

pack() { tar -czf "$results.tmp" -C "$results" . && mv "$results.tmp" "$results.tgz"; }

export results tune_minutes row_minutes
export -f job jobs_of links
small_words="${small[*]}"
export small_words
for group in $(seq 0 $(($# - 1))); do
  first=$((group * cores))
  first_gpu=$((group % groups_of_gpus * per_group))
  devices=$(seq -s, $first_gpu $((first_gpu + per_group - 1)))
  timeout -k 5 "$limit_s" taskset -c "$first-$((first + cores - 1))" \
    bash -c 'read -r -a small <<<"$small_words"; jobs_of "$0" "$1" "$2"' \
    "$group" "$devices" "${@:$((group + 1)):1}" &
done
while [ -n "$(jobs -pr)" ]; do
  sleep 15
  pack 2>/dev/null
done
pack
tail -n 4 "$results"/*/*.log
