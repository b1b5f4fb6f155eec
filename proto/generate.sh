#!/usr/bin/env bash
# Generate src/triptych/v1 from proto/, or with --check say whether it is current. Uses the pinned grpcio-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
out=src
if [ "${1:-}" = "--check" ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
"${PYTHON:-python}" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/triptych/v1/*.proto
printf '"""Generated from proto/triptych/v1 by proto/generate.sh. Never edited."""\n' > "$out/triptych/v1/__init__.py"
if [ "${1:-}" = "--check" ]; then
  diff -r --exclude=__pycache__ "$out/triptych/v1" src/triptych/v1 || { echo "generated code is not current: run make proto"; exit 1; }
fi
