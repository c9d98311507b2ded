#!/bin/bash
# Decisions of CubeCL's tuner last across processes, with Burn's feature `persistence`. By hand, on
# a device of Vulkan, since the feature brings a database to compile; RUNNER runs a program.
#
#     tests/tuner.sh
set -euo pipefail
cd "$(dirname "$0")/.."
features=vulkan,burn/persistence
program=$(cargo test -p distmuon-tests --features "$features" --test it --no-run 2>&1 |
  tee /dev/stderr | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
program=$(realpath "$program")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
printf '[autotune.decisions]\nfile = "decisions.json"\n\n[environment]\npath = "local"\n' >cubecl.toml
libraries=$(rustc --print sysroot)/lib
for process in first second; do
  BURN_DEVICE=vulkan LD_LIBRARY_PATH=$libraries ${RUNNER:-} "$program" tuned_kernels
  decisions=$(wc -l <decisions.json)
  echo "after the $process process: $decisions decisions"
  [ "$decisions" -eq "${first:=$decisions}" ] || { echo "the second process tuned again" >&2; exit 1; }
done
[ "$first" -gt 0 ]
