#!/usr/bin/env bash
# Make the virtual environment that every target runs in, or the part of it that running needs. Idempotent; called by make.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: setup.sh VENV [runtime|dev]}
kind=${2:-dev}
python=${PYTHON:-python3}

say() { printf 'setup: %s\n' "$*" >&2; }

apt_or_say() {
  if [ "$kind" = dev ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $*"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
  else
    say "missing: $*. Install it with the system's package manager, then run make again."
    exit 1
  fi
}

command -v "$python" >/dev/null || apt_or_say python3 python3-venv
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { say "Python 3.11 or later is needed, $python is $("$python" -V 2>&1). Set PYTHON=... to another."; exit 1; }
"$python" -c 'import ensurepip, venv' 2>/dev/null || apt_or_say python3-venv

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Twice quiet: errors are shown; warnings, of running as root or of a configured directory that is not there, are not.
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet)
if [ "$kind" = runtime ]; then
  say "installing what running needs into $venv (a few minutes the first time)"
  packages=(--editable '.[all]')
else
  say "installing what running, tests and tools need into $venv (a few minutes the first time)"
  packages=(--editable '.[all,demo]' --group dev --group kernels)
fi
"${pip[@]}" install --upgrade 'pip>=25.1'
# torch first and pinned: left to the resolver, the newest build comes with gigabytes of CUDA.
"${pip[@]}" install "${TORCH:-torch==2.13.0}"
"${pip[@]}" install "${packages[@]}"
# Tests of pulls between hosts need them; without them (or without root) these tests are skipped and say so.
if [ "$kind" = dev ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v ip && command -v iptables; } >/dev/null; then
  apt_or_say iproute2 iptables || say "iproute2 and iptables could not be installed: pulls between hosts will not be tested"
fi
# The store of several pool managers is tested against a Redis of the tests' own; without it these tests are skipped.
if [ "$kind" = dev ] && ! command -v redis-server >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt_or_say redis-server || say "redis-server could not be installed: the store in Redis will not be tested"
  else
    say "redis-server is missing: the store in Redis will not be tested"
  fi
fi
say "done"
