#!/usr/bin/env bash
# Change the policy and machine layers one small thing at a time and say which changes no test notices: `make mutants`.
# The tool's environment is made under build/ the first time; it sees the project's own packages behind its own.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/mutants

if ! [ "$venv/.installed" -nt scripts/mutants.txt ]; then
  echo "mutants: making $venv" >&2
  .venv/bin/python -m venv --clear "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --requirement scripts/mutants.txt
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$packages" >"$("$venv/bin/python" -c "$packages")/project.pth"
  touch "$venv/.installed"
fi
exec "$venv/bin/python" scripts/mutants.py "$@"
