#!/bin/bash
# All that only a GPU can show, in one go; docs/gpu.md tells how to use it.
#
#   benches/gpu.sh build             builds two programs, and prints their paths
#   benches/gpu.sh pack DIR PACKER   fills DIR with all that `gpu.sh run` needs where there are neither sources nor
#                                    Rust; PACKER DIR PROGRAM... packs the programs, and leaves run.sh to start them
#   benches/gpu.sh run [STEP...]     runs all steps or these, and writes down what they found; also as DIR/gpu.sh
#
# LIMIT and BUDGET are seconds, of a step and of all of them: what does not end in its time is ended. OUT is the folder
# of gpu.log and of the results. BURN_DEVICE is the device, cuda if not set; devices in software measure tiny shapes. In
# a source tree, PROFILE is cargo's profile, RUNNER a command that programs are started with, and TESTS the tests to
# choose.
set -euo pipefail
# A build that fails ends `pack`, too.
shopt -s inherit_errexit
here=$(cd "$(dirname "$0")" && pwd)
# What `pack` filled has run.sh beside this script; in a source tree the script lies in a folder.
packed=$here/run.sh
[ -e "$packed" ] || { packed=; here=$(dirname "$here"); }
device=${BURN_DEVICE:-cuda}
device=${device,,} # as Burn reads it
profile=${PROFILE:-gpu}

refuse() {
  echo "gpu.sh: $1" >&2
  exit 2
}

build() {
  programs cuda,vulkan,gpu-suite --test gpu_suite
  # Only benches measure which of Burn's products is the fastest: tests would measure every odd shape of theirs.
  programs cuda,vulkan,burn/autotune --bench gpu
}

programs() {
  # At fixed addresses: relocations would be a sixth of a program.
  (cd "$here" && cargo rustc --profile "$profile" --features "$@" --message-format json-render-diagnostics -- \
    -C relocation-model=static) | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

pack() {
  local dir=$1 packer=$2 built
  # Before the build, which takes long.
  command -v "$packer" >/dev/null || refuse "the packer $packer is not a program: expected what docs/gpu.md describes"
  built=$(build)
  mkdir -p "$dir/tests" "$dir/conformance" "$dir/src"
  "$packer" "$dir" $built
  cp -r "$here/benches/gpu.sh" "$here/benches/peers" "$dir"
  # To train on: 260 KB of text are enough.
  cp -r "$here"/src/{checkpoint,muon,orthogonalize,route} "$dir/src"
  cp -r "$here/tests/conformance" "$dir/tests"
  [ -z "${DISTMUON_CONFORMANCE_DIR:-}" ] || cp "$DISTMUON_CONFORMANCE_DIR"/*.safetensors "$dir/conformance"
  commit >"$dir/commit"
}

# What programs are built from, and how.
commit() { printf '%s, built with profile `%s`\n' "$(git -C "$here" describe --always --dirty)" "$profile"; }

# The newest program of a name in the target folder.
built() {
  local folder=$profile found
  [ "$profile" != dev ] || folder=debug
  folder=${CARGO_TARGET_DIR:-$here/target}/$folder
  found=$(find "$folder/deps" -name "$1-*" ! -name '*.*' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 || true)
  [ -n "$found" ] || refuse "the program $1 is missing: expected in $folder; run gpu.sh build"
  echo "${found#* }"
}

# The tests that TESTS chooses from those whose names begin like this; all if it chooses none.
tests() { printf '%s\n' ${TESTS:-} | grep "^$1" || echo "$1"; }

# A step a line: its name, a program, and its arguments; what is most at risk first.
steps() {
  local shapes= training='--preset gpt2 --steps 20 --batch 4' name group dtype peers=benches/peers
  [ -z "$packed" ] || peers=peers
  [ "$device" = cuda ] || shapes='--shapes 32x48 --repeats 1' training='--steps 2 --batch 2'
  for name in product gram fused mirror; do
    # Every thread has memory of its own on the device.
    echo "$name gpu_suite" $(tests $name::) --nocapture --test-threads 4
  done
  echo "conformance gpu_suite" $(tests golden_trajectories) --exact --nocapture
  # One test at a time: no other may use the device while a recording is made or memory is counted.
  for name in orthogonalize optimizer memory dist_muon; do
    echo "$name gpu_suite" $(tests $name::) --nocapture --test-threads 1
  done
  # The observer of launches is that of wgpu.
  [ "$device" != vulkan ] || echo "launches gpu_suite $(tests launches::) --nocapture --test-threads 1"
  echo 'nccl gpu_suite nccl --exact --nocapture'
  echo 'launch_times gpu launches'
  for dtype in bf16 f16; do
    for group in small large batched; do
      echo "${group}_$dtype gpu products iterations --group $group --dtype $dtype $shapes"
    done
  done
  echo "step_times gpu steps $shapes"
  echo 'collectives gpu collectives'
  echo "training gpu train_lm --data src --compare adamw,muon,dist-muon --sample 0 --eval-every 0 $training"
  for dtype in bfloat16 float16; do
    echo "peers_$dtype python3 -u $peers/torch_gpu.py --dtype $dtype"
  done
}

# Runs a step in its time, logs it, and adds its row to the table.
run_step() {
  local name=$1 program=$2 start=$SECONDS status=0 said=$work/$1 limit=${LIMIT:-150} skipped passed failed
  shift 2
  local command=("$program" "$@")
  case $program,$packed in
    python3,*) ;;
    *,) command=(${RUNNER:-} "$(built "$program")" "$@") ;;
    *) command=(bash "$packed" "${command[@]}") ;;
  esac
  printf '\n== %s: %s (%s s)\n' "$name" "$program $*" "$SECONDS" | tee -a "$log"
  [ $limit -lt $((budget - SECONDS)) ] || limit=$((budget - SECONDS))
  # Some programs do not end when they are asked to.
  timeout -k 5 $limit "${command[@]}" 2>&1 </dev/null | tee -a "$log" "$said" || status=$?
  skipped=$(grep -c 'skipped: ' "$said" || true)
  # 137 is of a program that had to be killed, or that took too much memory.
  if [ $status = 124 ] || { [ $status = 137 ] && [ $((SECONDS - start)) -ge $limit ]; }; then
    printf 'ended after %s s: %s\n' $limit "$name" | tee -a "$log"
    left+=("$name")
    row "$name" $((SECONDS - start)) "$(grep -c '^test .* ok$' "$said" || true)" "$skipped" 'ended'
    return
  fi
  # The last harness, or the one inside of it, which counts cases; those of other processes come before. A bench counts
  # as one.
  read -r passed failed < <(sed -n 's/^test result:.* \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' "$said" | tail -2 | head -1) || {
    passed=$((status == 0)) failed=0
  }
  # Nor is it a pass if nothing ran.
  [ "$failed" != 0 ] || { [ $status = 0 ] && [ "$passed" != 0 ]; } || failed=1
  row "$name" $((SECONDS - start)) "$passed" "$skipped" "$failed"
  [ "$failed" = 0 ] || bad+=("$name")
}

row() { printf '| %s | %s | %s | %s | %s |\n' "$@" >>"$work/table"; }

run() {
  local name line
  plan=$(steps)
  # A wrong name would be a step that does not run, without a word.
  for name; do
    grep -q "^$name " <<<"$plan" || refuse "the step $name is unknown: expected one of $(cut -d' ' -f1 <<<"$plan" | xargs)"
  done
  mkdir -p "${OUT:=$here}"
  OUT=$(cd "$OUT" && pwd)
  cd "$here"
  export DISTMUON_MUST_RUN=1 BURN_DEVICE=$device
  # As cargo does: LLVM may be the Rust toolchain's.
  [ -n "$packed" ] || export LD_LIBRARY_PATH=$(rustc --print sysroot)/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # The driver keeps what it compiled for later steps and runs.
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-${TMPDIR:-/tmp}/distmuon-cuda} CUDA_CACHE_MAXSIZE=4294967296
  [ "$device" != cuda ] || check_cuda
  [ -z "$packed" ] || [ -z "$(ls conformance)" ] || export DISTMUON_CONFORMANCE_DIR=${DISTMUON_CONFORMANCE_DIR:-$here/conformance}
  log=$OUT/gpu.log work=$(mktemp -d) budget=${BUDGET:-540} bad=() left=() asked=("$@")
  printf '| step | seconds | passed | skipped | failed |\n|---|---|---|---|---|\n' >"$work/table"
  # Whatever ends this, what was found is written down.
  trap finish EXIT
  trap 'exit 1' INT TERM
  while read -r line; do
    name=${line%% *}
    [ $SECONDS -lt $budget ] || break
    if is_asked "$name"; then run_step $line; fi
  done <<<"$plan"
}

is_asked() { [ ${#asked[@]} = 0 ] || [[ " ${asked[*]} " = *" $1 "* ]]; }

finish() {
  local name
  for name in $(cut -d' ' -f1 <<<"$plan"); do
    ! is_asked "$name" || grep -q "^| $name " "$work/table" || {
      left+=("$name")
      row "$name" 0 0 0 'not run'
    }
  done
  write_results "${asked[@]}"
  [ ${#left[@]} = 0 ] || echo "not done: ${left[*]}; go on with: gpu.sh run ${left[*]} (LIMIT=SECONDS for longer steps)"
  [ ${#bad[@]} = 0 ] || echo "failed: ${bad[*]}; see $log"
  rm -r "$work"
  [ ${#bad[@]} = 0 ] && [ ${#left[@]} = 0 ] || exit 1
}

# Finds what CubeCL's compiler needs on CUDA, or says what is missing.
check_cuda() {
  local folder found=
  command -v nvidia-smi >/dev/null ||
    refuse "the NVIDIA driver is missing: expected nvidia-smi; for a device in software, set BURN_DEVICE=vulkan"
  [ -z "$packed" ] || return 0 # run.sh brings it
  for folder in "${CUDA_PATH:-}" "$(dirname "$(dirname "$(command -v nvcc || echo /usr/bin/nvcc)")")" /usr/local/cuda \
    /opt/cuda "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0] + "/cu13")' 2>/dev/null || true)"; do
    [ -z "$folder" ] || [ ! -e "$folder/nvvm/libdevice/libdevice.10.bc" ] || { found=$folder; break; }
  done
  [ -n "$found" ] ||
    refuse "libdevice.10.bc is missing: expected in nvvm/libdevice of CUDA_PATH; pip install nvidia-nvvm, or set CUDA_PATH"
  export CUDA_PATH=$found
}

# The name of the GPU and its driver, or the device in software.
gpu() { nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || echo "$device"; }

# The LLVM that compiles the kernels, where it is a library: the build may have been made with another than users get.
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

# The file that the tables of README and docs are filled from; a later run adds its steps.
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

# The tables that a step printed, under its headings or under its name.
tables() {
  local said=$work/$1
  [ -e "$said" ] && grep -q '^|' "$said" || return 0
  grep -q '^## ' "$said" || printf '\n## %s\n\n' "$1"
  awk '/^## / { print "\n" $0 "\n" } /^\|/' "$said"
}

case ${1:-} in
  build) build ;;
  pack) pack "$2" "$3" ;;
  run) shift && run "$@" ;;
  *) sed -n '2,12s/^# \?//p' "$0" && exit 2 ;;
esac
