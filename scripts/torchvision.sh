#!/usr/bin/env bash
# Put torchvision beside the environment, for tests of models whose processors need it, and timm, for Gemma 3n; print their folder:
# `make test-models`. Torchvision is not in the environment, where transformers would take its image processors in place of those on Pillow.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?the interpreter}
releases=(torchvision==0.28.0 timm==1.0.31)
folder=build/torchvision
if [ "$(cat "$folder/.installed" 2>/dev/null)" != "${releases[*]}" ]; then
  rm -rf "$folder"
  if ! "$python" -m pip --disable-pip-version-check --quiet install --no-deps --target "$folder" "${releases[@]}" >&2; then
    echo "NOT TESTED: models whose processors need torchvision, which could not be installed" >&2
    exit 0
  fi
  cat scripts/torchvision_operators.txt >>"$folder/torchvision/extension.py"
  echo "${releases[*]}" >"$folder/.installed"
fi
echo "$PWD/$folder"
