#!/usr/bin/env bash
# Run what depends on transformers under another release of it: `make test-transformers VERSION=5.19.0`.
# Its environment (100 MB) is made under build/ the first time; all other packages are those of the main one.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?which release of transformers? For example: make test-transformers VERSION=5.19.0}
shift
venv=build/transformers-$version

if [ ! -e "$venv/.installed" ]; then
  echo "test-transformers: making $venv" >&2
  .venv/bin/python -m venv --clear "$venv"
  where='import sysconfig; print(sysconfig.get_path("purelib"))'
  # Behind its own packages come those of the main environment, the project itself among them.
  echo "import site; site.addsitedir('$(.venv/bin/python -c "$where")')" >"$("$venv/bin/python" -c "$where")/main.pth"
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet install "transformers==$version"
  touch "$venv/.installed"
fi
HF_HUB_OFFLINE=1 "$venv/bin/python" -c "
import torch, transformers
assert transformers.__version__ == '$version', transformers.__version__
print(f'test-transformers: transformers {transformers.__version__}, torch {torch.__version__}')"
exec "$venv/bin/python" -m pytest -p no:cacheprovider -rsfE \
  tests/integration/families tests/unit/engine tests/unit/families tests/unit/tokens "$@"
