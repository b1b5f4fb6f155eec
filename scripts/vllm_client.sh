#!/usr/bin/env bash
# Run vLLM's benchmark client, unchanged, against a local cluster: `make vllm-client`; with ENGINE=vllm its text process is vLLM's.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=${ENGINE:-triptych}
python=$(scripts/vllm_environment.sh)
case $engine in
  triptych) up=(.venv/bin/triptych up) result=vllm-client ;;
  vllm)
    arguments='--enforce-eager --kv-cache-memory-bytes 67108864'
    up=("$python" -m triptych.cli up --engine vllm --vllm-args "$arguments") result=vllm-client-vllm
    ;;
  *) echo "ENGINE=$engine is neither triptych nor vllm" >&2; exit 2 ;;
esac
result=${1:-benchmarks/results/$result}

log=build/vllm-client-up.log
: >"$log"  # it is read before the other process has opened it
"${up[@]}" --port 0 --router-port 0 --no-live >"$log" 2>&1 &
up=$!
trap 'kill "$up" 2>/dev/null; wait "$up" || true' EXIT
url=
for _ in $(seq 6000); do
  url=$(sed -n 's/^ready in .* at \(http[^ ]*\)$/\1/p' "$log")
  [ -n "$url" ] && break
  kill -0 "$up" || { cat "$log" >&2; exit 1; }
  sleep 0.1
done
[ -n "$url" ] || { cat "$log" >&2; exit 1; }

mkdir -p "$(dirname "$result")"
load=$(cut -d' ' -f1 /proc/loadavg)
HF_HUB_OFFLINE=1 "$python" -m vllm.entrypoints.cli.main bench serve \
  --backend openai-chat --base-url "$url" --endpoint /v1/chat/completions \
  --model triptych-demo --tokenizer src/triptych/demo/model \
  --dataset-name random-mm --num-prompts 40 --request-rate 4 --seed 0 \
  --random-input-len 16 --random-output-len 16 --random-range-ratio 0 \
  --random-mm-base-items-per-request 2 --random-mm-num-mm-items-range-ratio 0.5 \
  --random-mm-limit-mm-per-prompt '{"image": 4, "video": 0}' --random-mm-bucket-config '{(112, 112, 1): 1.0}' \
  --temperature 0 --save-result --result-dir "$(dirname "$result")" --result-filename "$(basename "$result").json" |
  tee build/vllm-client.log
{
  echo "vllm bench serve $("$python" -c 'from importlib.metadata import version; print(version("vllm"))') (make vllm-client ENGINE=$engine) against triptych up: 2 encoders, 1 text process with the engine $engine, demo model"
  echo "load average before: $load"
  .venv/bin/python -c 'from benchmarks.machine import describe; print(*(f"{k}: {v}" for k, v in describe().items()), sep="\n")'
  sed -n '/^=* Serving/,$p' build/vllm-client.log
} >"$result.txt"
grep -q '^Failed requests: *0 *$' "$result.txt"
