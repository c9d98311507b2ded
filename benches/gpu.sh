#!/bin/bash
# All that docs/gpu.md runs on a GPU, in two halves, since what builds need not be what runs.
#
#   benches/gpu.sh build               builds tests and benches for CUDA, and prints their paths
#   benches/gpu.sh run [STARTER...]    runs them; all of them, whatever fails, and tells that at the end
#
# STARTER starts a program by its name, without the hash that cargo gives it: `STARTER product --nocapture`. Without
# one, what was built here is run. PROFILE, FEATURES, BURN_DEVICE and SHAPES choose others than release, CUDA with
# Burn's autotuning, the device cuda and the shapes of benches/gpu.rs.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${PROFILE:-release}
features=${FEATURES:-cuda,burn/autotune}
export BURN_DEVICE=${BURN_DEVICE:-cuda}

kernels=(product gram fused mirror)
tests=(orthogonalize optimizer memory dist_muon)

build() {
  local names=("${kernels[@]}" "${tests[@]}" conformance cuda)
  cargo test --profile "$profile" --workspace --features "$features" --no-run --lib --bench gpu \
    "${names[@]/#/--test=}" 2>&1 | tee /dev/stderr | sed -n 's/.*Executable.*(\(.*\))$/\1/p'
}

start() {
  local name=$1 target=${CARGO_TARGET_DIR:-target} folder
  shift
  folder=$([ "$profile" = dev ] && echo debug || echo "$profile")
  "$(ls -t "$target/$folder/deps/$name"-* | grep -v '\.' | head -1)" "$@"
}

failed=()
step() {
  printf '\n== %s (%s s)\n' "$*" "$SECONDS"
  timeout "${LIMIT:-600}" "${starter[@]}" "$@" || failed+=("$1: exit $?")
}

run() {
  # Right?
  for test in "${kernels[@]}"; do step "$test" --show-output; done
  step distmuon --show-output adamw:: tune::
  # Nobody else may use the device while a recording is made.
  for test in "${tests[@]}"; do step "$test" --show-output --test-threads 1; done
  step conformance
  step cuda --show-output
  # Fast?
  step gpu ${SHAPES:+--shapes $SHAPES}
  starter=(python3)
  for dtype in float16 bfloat16; do step benches/peers/torch_gpu.py --dtype "$dtype"; done
  printf '\n%s failed\n' "${#failed[@]}"
  printf '%s\n' "${failed[@]}"
  [ ${#failed[@]} = 0 ]
}

case ${1:-} in
  build) build ;;
  run)
    shift
    starter=("$@")
    if [ $# = 0 ]; then
      export -f start
      export profile
      starter=(bash -c 'start "$@"' start)
    fi
    run
    ;;
  *) sed -n '2,10s/^# \?//p' "$0" && exit 2 ;;
esac
