#!/bin/bash
# Runs every test and measurement that needs a GPU; docs/guide/gpu.md explains how to use it.
#
#   benches/gpu.sh build             builds two programs, and prints their paths
#   benches/gpu.sh pack DIR PACKER   fills DIR with all that `gpu.sh run` needs on a machine without
#                                    sources and without Rust; PACKER DIR PROGRAM... packs the
#                                    programs, and writes DIR/run.sh, which starts them
#   benches/gpu.sh run [STEP...]     runs all steps or these, and writes their results; DIR/gpu.sh
#                                    does the same
#
# LIMIT and BUDGET are seconds, of a step and of all steps together: a step that exceeds them is
# ended. OUT is the folder of gpu.log and of the results. BURN_DEVICE is the device, cuda if not
# set; software devices measure tiny shapes. In a source tree, PROFILE is cargo's profile, RUNNER a
# command that starts the programs, and TESTS a selection of tests.
set -euo pipefail
# A build that fails also ends `pack`.
shopt -s inherit_errexit
here=$(cd "$(dirname "$0")" && pwd)
# In a folder that `pack` filled, run.sh is next to this script. In a source tree, the script is one
# folder below the root.
packed=$here/run.sh
[ -e "$packed" ] || { packed=; here=$(dirname "$here"); }
device=${BURN_DEVICE:-cuda}
device=${device,,} # Burn ignores the case
profile=${PROFILE:-gpu}

refuse() {
  echo "gpu.sh: $1" >&2
  exit 2
}

build() {
  programs distmuon-tests cuda,vulkan,gpu-suite --test gpu_suite
  # The tests are built without burn/autotune, which would measure Burn's products for each of their
  # many shapes.
  programs distmuon-benches cuda,vulkan,burn/autotune --bench gpu
}

# Builds a program of a package with features, and prints its path.
programs() {
  local package=$1
  shift
  # At fixed addresses, since relocations would be a sixth of a program's size.
  (cd "$here" && cargo rustc --profile "$profile" -p "$package" --features "$@" \
    --message-format json-render-diagnostics -- -C relocation-model=static) | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

pack() {
  local dir=$1 packer=$2 built
  # Checked before the build, which takes minutes.
  command -v "$packer" >/dev/null ||
    refuse "the packer $packer is not a program: expected the one that docs/guide/gpu.md describes"
  built=$(build)
  mkdir -p "$dir/tests" "$dir/conformance" "$dir/src"
  "$packer" "$dir" $built
  cp -r "$here/benches/gpu.sh" "$here/benches/peers" "$dir"
  # The text that `train_lm` trains on, which needs 164 KB or more.
  cp -r "$here"/src/{checkpoint,distributed} "$dir/src"
  cp -r "$here/tests/conformance" "$dir/tests"
  [ -z "${DISTMUON_CONFORMANCE_DIR:-}" ] || cp -r "$DISTMUON_CONFORMANCE_DIR"/. "$dir/conformance"
  commit >"$dir/commit"
}

# Prints the commit and the profile of the programs.
commit() { printf '%s, built with profile `%s`\n' "$(git -C "$here" describe --always --dirty)" "$profile"; }

# Prints the path of the newest program of a name in the target folder.
built() {
  local folder=$profile newest
  [ "$profile" != dev ] || folder=debug
  folder=${CARGO_TARGET_DIR:-$here/target}/$folder
  newest=$(find "$folder/deps" -name "$1-*" ! -name '*.*' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 || true)
  [ -n "$newest" ] || refuse "the program $1 is missing: expected in $folder; run gpu.sh build"
  echo "${newest#* }"
}

# Prints the tests in TESTS whose names begin with the argument, or the argument, which selects all
# of them, if TESTS has none.
tests() { printf '%s\n' ${TESTS:-} | grep "^$1" || echo "$1"; }

# Prints one step per line: its name, a program, and its arguments. The steps that are most likely
# to fail come first.
steps() {
  local shapes= groups='small large batched' optimizers=adamw,muon,dist-muon
  local training='--preset gpt2 --steps 20 --batch 4'
  local name group dtype peers=benches/peers
  [ -z "$packed" ] || peers=peers
  # Given shapes replace those of a group.
  [ "$device" = cuda ] || {
    shapes='--shapes 32x48 --repeats 1' groups=small
    optimizers=muon,dist-muon training='--steps 2 --batch 2'
  }
  for name in product gram fused mirror; do
    # Few threads, since each allocates its own memory on the device.
    echo "$name gpu_suite" $(tests $name::) --nocapture --test-threads 4
  done
  echo "conformance gpu_suite" $(tests golden_trajectories) --exact --nocapture
  # One test at a time, since no other test may use the device while one records graphs or counts
  # memory.
  for name in orthogonalize optimizer parts precision memory dist_muon; do
    echo "$name gpu_suite" $(tests $name::) --nocapture --test-threads 1
  done
  # Launches are observed in wgpu.
  [ "$device" != vulkan ] || echo "launches gpu_suite $(tests launches::) --nocapture --test-threads 1"
  echo 'nccl gpu_suite nccl --exact --nocapture'
  echo 'launch_times gpu launches'
  for dtype in bf16 f16; do
    for group in $groups; do
      echo "${group}_$dtype gpu products native iterations --group $group --dtype $dtype $shapes"
    done
  done
  echo "step_times gpu steps $shapes"
  echo 'collectives gpu collectives'
  echo "training gpu train_lm --data src --compare $optimizers --sample 0 --eval-every 0 $training"
  # Two ranks, which are threads and may share a device. All print the same losses.
  local ranks="gpu train_lm --data src --ranks 2 --sample 0 --eval-every 0 $training"
  echo "layout_replicated $ranks"
  echo "layout_hidden $ranks --overlap"
  echo "layout_owned $ranks --owned dp"
  for dtype in bfloat16 float16; do
    echo "peers_$dtype python3 -u $peers/torch_gpu.py --dtype $dtype"
  done
}

# Runs a step within its time, logs its output, and adds its row to the table.
run_step() {
  local name=$1 program=$2 start=$SECONDS status=0 output=$work/$1 limit=${LIMIT:-150} skipped passed failed
  shift 2
  local command=("$program" "$@")
  case $program,$packed in
    python3,*) ;;
    *,) command=(${RUNNER:-} "$(built "$program")" "$@") ;;
    *) command=(bash "$packed" "${command[@]}") ;;
  esac
  printf '\n== %s: %s (%s s)\n' "$name" "$program $*" "$SECONDS" | tee -a "$log"
  [ $limit -lt $((budget - SECONDS)) ] || limit=$((budget - SECONDS))
  # Programs that ignore the signal of timeout are killed 5 seconds later.
  timeout -k 5 $limit "${command[@]}" 2>&1 </dev/null | tee -a "$log" "$output" || status=$?
  skipped=$(grep -c 'skipped: ' "$output" || true)
  # 137 is the status of a program that was killed: by timeout, or for its use of memory.
  if [ $status = 124 ] || { [ $status = 137 ] && [ $((SECONDS - start)) -ge $limit ]; }; then
    printf 'ended after %s s: %s\n' $limit "$name" | tee -a "$log"
    unfinished+=("$name")
    row "$name" $((SECONDS - start)) "$(grep -c '^test .* ok$' "$output" || true)" "$skipped" 'ended'
    return
  fi
  # The counts of the last harness, or of the harness inside it, which counts cases. Those of other
  # processes come before. A bench counts as one test.
  read -r passed failed < <(sed -n 's/^test result:.* \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' "$output" | tail -2 | head -1) || {
    passed=$((status == 0)) failed=0
  }
  # A step in which nothing ran has failed.
  [ "$failed" != 0 ] || { [ $status = 0 ] && [ "$passed" != 0 ]; } || failed=1
  row "$name" $((SECONDS - start)) "$passed" "$skipped" "$failed"
  [ "$failed" = 0 ] || broken+=("$name")
}

row() { printf '| %s | %s | %s | %s | %s |\n' "$@" >>"$work/table"; }

run() {
  local name line
  plan=$(steps)
  # Otherwise a misspelt step would be left out without a message.
  for name; do
    grep -q "^$name " <<<"$plan" || refuse "the step $name is unknown: expected one of $(cut -d' ' -f1 <<<"$plan" | xargs)"
  done
  mkdir -p "${OUT:=$here}"
  OUT=$(cd "$OUT" && pwd)
  cd "$here"
  export DISTMUON_MUST_RUN=1 BURN_DEVICE=$device
  # As cargo does, since LLVM may be that of the Rust toolchain.
  [ -n "$packed" ] || export LD_LIBRARY_PATH=$(rustc --print sysroot)/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # The driver keeps compiled kernels for later steps and runs.
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-${TMPDIR:-/tmp}/distmuon-cuda} CUDA_CACHE_MAXSIZE=4294967296
  [ "$device" != cuda ] || check_cuda
  [ -z "$packed" ] || [ -z "$(ls conformance)" ] || export DISTMUON_CONFORMANCE_DIR=${DISTMUON_CONFORMANCE_DIR:-$here/conformance}
  log=$OUT/gpu.log work=$(mktemp -d) budget=${BUDGET:-540} broken=() unfinished=() requested=("$@")
  printf '| step | seconds | passed | skipped | failed |\n|---|---|---|---|---|\n' >"$work/table"
  # Results are also written if a signal or an error ends the script.
  trap finish EXIT
  trap 'exit 1' INT TERM
  while read -r line; do
    name=${line%% *}
    [ $SECONDS -lt $budget ] || break
    if is_requested "$name"; then run_step $line; fi
  done <<<"$plan"
}

is_requested() { [ ${#requested[@]} = 0 ] || [[ " ${requested[*]} " = *" $1 "* ]]; }

finish() {
  local name
  for name in $(cut -d' ' -f1 <<<"$plan"); do
    ! is_requested "$name" || grep -q "^| $name " "$work/table" || {
      unfinished+=("$name")
      row "$name" 0 0 0 'not run'
    }
  done
  write_results "${requested[@]}"
  [ ${#unfinished[@]} = 0 ] ||
    echo "not done: ${unfinished[*]}; continue with: gpu.sh run ${unfinished[*]} (LIMIT=SECONDS for longer steps)"
  [ ${#broken[@]} = 0 ] || echo "failed: ${broken[*]}; see $log"
  rm -r "$work"
  [ ${#broken[@]} = 0 ] && [ ${#unfinished[@]} = 0 ] || exit 1
}

# Finds the files that CubeCL's compiler needs on CUDA, or says what is missing.
check_cuda() {
  local folder toolkit=
  command -v nvidia-smi >/dev/null ||
    refuse "the NVIDIA driver is missing: expected nvidia-smi; for a software device, set BURN_DEVICE=vulkan"
  [ -z "$packed" ] || return 0 # run.sh sets CUDA_PATH
  for folder in "${CUDA_PATH:-}" "$(dirname "$(dirname "$(command -v nvcc || echo /usr/bin/nvcc)")")" /usr/local/cuda \
    /opt/cuda "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0] + "/cu13")' 2>/dev/null || true)"; do
    [ -z "$folder" ] || [ ! -e "$folder/nvvm/libdevice/libdevice.10.bc" ] || { toolkit=$folder; break; }
  done
  [ -n "$toolkit" ] ||
    refuse "libdevice.10.bc is missing: expected in nvvm/libdevice of CUDA_PATH; pip install nvidia-nvvm, or set CUDA_PATH"
  export CUDA_PATH=$toolkit
}

# Prints the name of the GPU and its driver, or the software device.
gpu() { nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || echo "$device"; }

# Prints the name of the LLVM library that compiles the kernels. A build may have another one than
# users get.
llvm() {
  local library
  if [ -n "$packed" ]; then library=$(bash "$packed" --unpack); else library=$(ldd "$(built gpu_suite)"); fi
  library=$(grep -o 'libLLVM[^ ]*' <<<"$library" | head -1 || true)
  case $library in
    '') echo 'the one that Burn downloads' ;;
    *rust*) echo "$library, the Rust toolchain's: not the one that Burn downloads and users get" ;;
    *) echo "$library" ;;
  esac
}

# Writes the file from which the tables of README and docs are filled. A later run adds its steps.
write_results() {
  local name file folder=$OUT step
  name=$([ "$device" = cuda ] && gpu || echo "$device")
  [ "$OUT" != "$here" ] || folder=docs/results
  mkdir -p "$folder"
  file=$folder/gpu-$(tr -cs 'A-Za-z0-9\n' - <<<"${name%%,*}" | sed 's/-*$//')-$(date +%F).md
  {
    [ ! -s "$file" ] || printf '\n'
    printf '# %s, %s\n\n' "${name%%,*}" "$(date +%F)"
    printf -- '- device and driver: %s (`BURN_DEVICE=%s`)\n' "$name" "$device"
    printf -- '- LLVM: %s\n' "$(llvm)"
    printf -- '- commit: %s\n' "$(cat commit 2>/dev/null || commit)"
    printf -- '- command: `gpu.sh run%s`\n' "${*:+ $*}"
    printf '\n## Steps\n\n'
    cat "$work/table"
    for step in $(tail -n +3 "$work/table" | cut -d' ' -f2); do tables "$step"; done
  } >>"$file"
  printf '\n' && tee -a "$log" <"$work/table"
  echo "results: $file"
}

# Prints the tables of a step's output, under its headings or under the step's name.
tables() {
  local output=$work/$1
  [ -e "$output" ] && grep -q '^|' "$output" || return 0
  grep -q '^## ' "$output" || printf '\n## %s\n\n' "$1"
  awk '/^## / { print "\n" $0 "\n" } /^\|/' "$output"
}

case ${1:-} in
  build) build ;;
  pack) pack "$2" "$3" ;;
  run) shift && run "$@" ;;
  *) sed -n '2,14s/^# \?//p' "$0" && exit 2 ;;
esac
