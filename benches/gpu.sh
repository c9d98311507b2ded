#!/bin/bash
# Runs every test and measurement that needs a GPU; docs/guide/gpu.md explains how to use it.
#
#   benches/gpu.sh build                 builds two programs, and prints their paths
#   benches/gpu.sh pack DIR              builds, and fills DIR with all that a machine without
#                                        sources and Rust needs; the script is DIR/gpu.sh there
#   benches/gpu.sh preflight [DIR]       checks, without a GPU, what can be known before a run
#   benches/gpu.sh host                  measures the host's part of a step, without a GPU
#   benches/gpu.sh run [STEP...]         runs all steps or these, and writes their results
#   benches/gpu.sh start PROGRAM ARG...  runs gpu_suite or gpu as a step does
#
# Variables of `run`:
#   LIMIT    seconds of a step: 150 of tests, 240 of what runs alone; one that exceeds them is ended
#   BUDGET   seconds of all steps together (540)
#   JOBS     tests that run at a time (4 on CUDA, since they wait for compilers; otherwise 1)
#   OUT      the folder of gpu.log and of the results
#   BURN_DEVICE  the device (cuda)
#   SMALL    if set, tiny shapes are measured, as on software devices
# Of all commands, in a source tree:
#   PROFILE  cargo's profile (gpu)
#   BUILT    if set, `pack` takes the programs that are built
#   PRESET   the compression of `pack`, from 0 to 9e (9e, with the memory of a large dictionary)
#   RUNNER   a command that starts the programs
#   TESTS    a selection of tests
set -euo pipefail
# A build that fails also ends `pack`.
shopt -s inherit_errexit
here=$(cd "$(dirname "$0")" && pwd)
# In a folder that `pack` filled, the archive is next to this script. In a source tree, the script
# is one folder below the root.
packed=$here/archive.tar.xz
[ -e "$packed" ] || { packed=; here=$(dirname "$here"); }
device=${BURN_DEVICE:-cuda}
device=${device,,} # Burn ignores the case
profile=${PROFILE:-gpu}

refuse() {
  echo "gpu.sh: $1" >&2
  exit 2
}

# Programs.

build() {
  build_program distmuon-tests cuda,vulkan,gpu-suite --test gpu_suite
  # The tests are built without burn/autotune, which would measure Burn's products for each of their
  # many shapes.
  build_program distmuon-benches cuda,vulkan,burn/autotune --bench gpu
}

# Builds a program of a package with features, and prints its path.
build_program() {
  local package=$1
  shift
  # At fixed addresses, since relocations would be a sixth of a program's size.
  (cd "$here" && cargo rustc --profile "$profile" -p "$package" --features "$@" \
    --message-format json-render-diagnostics -- -C relocation-model=static) | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'
}

# Prints the path of a program: the packed one, or the newest one in the target folder.
program() {
  local folder=$profile newest
  [ -z "$packed" ] || { echo "$here/bin/$1"; return; }
  [ "$profile" != dev ] || folder=debug
  folder=${CARGO_TARGET_DIR:-$here/target}/$folder
  newest=$(find "$folder/deps" -name "$1-*" ! -name '*.*' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 || true)
  [ -n "$newest" ] || refuse "the program $1 is missing: expected in $folder; run gpu.sh build"
  echo "${newest#* }"
}

# Prepares the environment of the programs, and unpacks them.
prepare() {
  local libraries
  if [ -n "$packed" ]; then
    unpack
    libraries=$here/lib:$(wheels)
  else
    # As cargo does, since LLVM may be that of the Rust toolchain.
    libraries=$(rustc --print sysroot)/lib
  fi
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # The driver keeps compiled kernels for later steps and runs.
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-${TMPDIR:-/tmp}/distmuon-cuda} CUDA_CACHE_MAXSIZE=4294967296
  export BURN_DEVICE=$device
  [ "$device" != cuda ] || {
    CUDA_PATH=$(toolkit)
    export CUDA_PATH
  }
}

# Prints the folders with NVIDIA's libraries of the first Python environment, such as those that
# PyTorch brings, with a colon between them.
wheels() {
  local folder
  folder=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null) || return 0
  find "$folder" -maxdepth 2 -name lib -type d | paste -sd :
}

# Prints the first folder with the library of functions that CubeCL's compiler needs on CUDA.
toolkit() {
  local folder
  for folder in "${CUDA_PATH:-}" "$(dirname "$(dirname "$(command -v nvcc || echo /usr/bin/nvcc)")")" /usr/local/cuda \
    /opt/cuda "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0] + "/cu13")' 2>/dev/null || true)" \
    "${DISTMUON_CUDA_TOOLS:-}" "$here"; do
    [ -z "$folder" ] || [ ! -e "$folder/nvvm/libdevice/libdevice.10.bc" ] || { echo "$folder"; return; }
  done
  refuse "libdevice.10.bc is missing: expected in nvvm/libdevice of CUDA_PATH; pip install nvidia-nvvm, or set CUDA_PATH"
}

start() {
  local name=$1 path
  shift
  prepare
  path=$(program "$name")
  cd "$here"
  exec ${RUNNER:-} "$path" "$@"
}

# Packed folders.

pack() {
  local dir=$1 preset=${PRESET:-9e} toolkit programs path
  # Before the build, which takes minutes.
  toolkit=$(toolkit)
  programs=$([ -n "${BUILT:-}" ] && program gpu_suite && program gpu || build)
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  mkdir -p "$dir" "$stage"/{bin,lib,nvvm/libdevice,peers,tests,conformance,src}
  cp "$toolkit/nvvm/libdevice/libdevice.10.bc" "$stage/nvvm/libdevice"
  for path in $programs; do
    strip -o "$stage/bin/$(basename "${path%-*}")" "$path"
    libraries "$path" | xargs -r cp -t "$stage/lib"
  done
  # The text that `train_lm` trains on, which needs 164 KB or more.
  cp -r "$here"/src/{checkpoint,distributed} "$stage/src"
  cp -r "$here/tests/conformance" "$stage/tests"
  [ -z "${DISTMUON_CONFORMANCE_DIR:-}" ] || cp -r "$DISTMUON_CONFORMANCE_DIR"/. "$stage/conformance"
  cp "$here"/benches/peers/*.py "$here"/cubecl_kernels/src/native/kernels/*.ptx "$stage/peers"
  commit >"$stage/commit"
  # A dictionary that holds the largest file, LLVM, saves a tenth of it.
  [ "$preset" != 9e ] || preset+=,dict=192MiB
  tar -C "$stage" -c . | xz --x86 --lzma2=preset="$preset" >"$dir/archive.tar.xz"
  cp "$here/benches/gpu.sh" "$dir"
  echo "$(wc -c <"$dir/archive.tar.xz") bytes in $dir/archive.tar.xz; check it with: gpu.sh preflight $dir"
}

# Prints the libraries that a program loads when it starts, except the system's.
libraries() { LD_LIBRARY_PATH=$(rustc --print sysroot)/lib ldd "$1" | sed -nE 's/.* => (\/[^ ]+) .*/\1/p' | grep -Ev '^/(usr/)?lib' || true; }

# Unpacks an archive once, next to it; a second process waits for the first. Python reads it, since
# not every machine has xz.
unpack() {
  (
    flock 9
    [ "$here/unpacked" -nt "$packed" ] || {
      python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$packed" "$here"
      touch "$here/unpacked"
    }
  ) 9>"$here/lock"
}

# Prints the commit and the profile of the programs.
commit() { printf '%s, built with profile `%s`\n' "$(git -C "$here" describe --always --dirty)" "$profile"; }

# Steps.

# Prints the tests in TESTS whose names begin with the argument, or the argument, which selects all
# of them, if TESTS has none.
tests() { { xargs -n 1 <<<"${TESTS:-}" | grep "^$1" || echo "$1"; } | xargs; }

# Prints one step per line: its name; `shared` if it may run next to others, or `alone` if it counts
# memory or measures; DISTMUON_NATIVE; a program; its arguments. Tests come first, then what is most
# worth to know.
steps() {
  local small='' shape=32x48 groups='large,batched,small' dtypes=bf16,f16 optimizers=adamw,muon,dist-muon
  local training='--preset gpt2 --steps 20 --batch 4' train='train_lm --data src --sample 0 --eval-every 0'
  local name native plain=on peers=benches/peers half="then $train --dtype bf16 --optimizer dist-muon"
  [ -z "$packed" ] || peers=peers
  # Where there are native kernels for the device, a refusal fails.
  native=${DISTMUON_NATIVE:-$(is_hopper && echo must || echo on)}
  [ "$native" != off ] || plain=off
  [ "$device" = cuda ] && [ -z "${SMALL:-}" ] || {
    # Larger than what a single cube computes, so that the native kernels also run.
    [ "$device" != cuda ] || shape=128x136
    small="--shapes $shape --repeats 1" groups=small dtypes=bf16
    optimizers=muon,dist-muon training='--steps 2 --batch 2' half=
  }
  [ "$device" != cuda ] || echo "native alone $plain python3 -u $peers/native_probe.py facts check order"
  for name in product gram fused mirror; do
    # Few threads, since each allocates its own memory on the device.
    echo "$name shared $plain gpu_suite $(tests "$name::") --nocapture --test-threads 4"
  done
  # One test at a time in a process, which records no graphs while another test runs.
  for name in orthogonalize parts optimizer precision; do
    in_half_precision "$native" "$name" "$(tests "$name::") --nocapture --test-threads 1"
  done
  in_half_precision "$native" conformance "$(tests golden_trajectories) --exact --nocapture"
  for name in dist_muon audits saver states_on_host; do
    echo "$name shared $native gpu_suite $(tests "$name::") --nocapture --test-threads 1"
  done
  # Launches are observed in wgpu.
  [ "$device" != vulkan ] || echo "launches alone $plain gpu_suite $(tests launches::) --nocapture --test-threads 1"
  echo "memory alone $plain gpu_suite $(tests memory::) --nocapture --test-threads 1"
  echo "nccl alone $native gpu_suite nccl --exact --nocapture"
  echo "iterations alone $native gpu iterations --group $groups --dtype $dtypes $small"
  echo "step_times alone $native gpu steps $small"
  echo "training alone $native gpu $train --compare $optimizers --dtype f32 $training${half:+ $half $training}"
  echo "launch_times alone $plain gpu launches"
  echo "peers_bfloat16 alone $plain python3 -u $peers/torch_gpu.py --dtype bfloat16"
  echo "native_products alone $native gpu native --group $groups --dtype $dtypes $small"
  [ "$device" != cuda ] || echo "generations alone $plain python3 -u $peers/native_probe.py --candidates --seconds 200 check launch generations"
  echo "products alone $plain gpu products --group $groups --dtype $dtypes $small"
  echo "collectives alone $plain gpu collectives"
  # Two ranks, which are threads and may share a device. All layouts print the same losses.
  train+=" --ranks 2 --dtype f32 $training"
  echo "layouts alone $native gpu $train then $train --overlap then $train --owned dp"
  echo "peers_float16 alone $plain python3 -u $peers/torch_gpu.py --dtype float16"
}

# Prints a step of tests that iterate in half precision. Where native kernels compute these
# iterations, CubeCL's do in a second step.
in_half_precision() {
  local native=$1 name=$2 arguments=$3
  echo "$name shared $native gpu_suite $arguments"
  [ "$native" != must ] || echo "${name}_cubecl shared off gpu_suite $arguments"
}

# Succeeds if there are native kernels for the GPU.
is_hopper() {
  [ "$device" = cuda ] && [ "$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1)" = 9.0 ]
}

run() {
  local name way native command
  [ "$device" != cuda ] || command -v nvidia-smi >/dev/null ||
    refuse "the NVIDIA driver is missing: expected nvidia-smi; for a software device, set BURN_DEVICE=vulkan"
  plan=$(steps)
  # Otherwise a misspelt step would be left out without a message.
  for name; do
    grep -q "^$name " <<<"$plan" || refuse "the step $name is unknown: expected one of $(cut -d' ' -f1 <<<"$plan" | xargs)"
  done
  mkdir -p "${OUT:=$here}"
  OUT=$(cd "$OUT" && pwd)
  cd "$here"
  prepare
  export DISTMUON_MUST_RUN=1
  [ -z "$packed" ] || [ -z "$(ls conformance)" ] || export DISTMUON_CONFORMANCE_DIR=${DISTMUON_CONFORMANCE_DIR:-$here/conformance}
  log=$OUT/gpu.log work=$(mktemp -d) budget=${BUDGET:-540} holder='' requested=("$@")
  jobs=${JOBS:-$([ "$device" = cuda ] && echo 4 || echo 1)}
  printf '| step | seconds | passed | skipped | failed |\n|---|---|---|---|---|\n' >"$work/table"
  # Results are also written if a signal or an error ends the script.
  trap finish EXIT
  trap 'exit 1' INT TERM
  [ "$device" != cuda ] || hold_device
  while read -r name way native command; do
    is_requested "$name" || continue
    wait_for_room "$way"
    [ $SECONDS -lt "$budget" ] || break
    if has_failed native; then
      # A step without native kernels was planned only as a second one.
      [[ $name != *_cubecl ]] || { row "$name" 0 0 0 'not needed'; continue; }
      native=off
    fi
    if [ "$way" = shared ]; then
      run_step "$name" "$way" "$native" $command &
    else
      run_step "$name" "$way" "$native" $command
      ! has_failed "$name" || [ "$name" != native ] ||
        echo 'native kernels are wrong: all other steps run without them' | tee -a "$log"
    fi
  done <<<"$plan"
  wait
}

# Waits until a step can begin: one that runs alone, until all others have ended.
wait_for_room() {
  if [ "$1" = shared ]; then
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
  else
    wait
  fi
}

# Keeps the driver initialised, which otherwise takes a second or two in each process.
hold_device() {
  python3 -c 'import ctypes, sys, time
driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
driver.cuInit(0)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
time.sleep(float(sys.argv[1]))' "$budget" >/dev/null 2>&1 </dev/null &
  holder=$!
  # So that `wait` does not wait for it.
  disown $holder
}

# Runs a step within its time, logs its output, and adds its row to the table, which is all that
# remains of it.
run_step() {
  local name=$1 way=$2 native=$3 program=$4 begin=$SECONDS status=0 output=$work/$1.out label='' limit
  local skipped passed failed command=()
  shift 4
  limit=${LIMIT:-$([ "$way" = alone ] && echo 240 || echo 150)}
  [ "$limit" -lt $((budget - SECONDS)) ] || limit=$((budget - SECONDS))
  if [ "$program" != python3 ]; then
    read -ra command <<<"${RUNNER:-}"
    program=$(program "$program")
  fi
  command+=("$program" "$@")
  # Lines of steps that run at the same time are told apart.
  [ "$way" = alone ] || label="$name: "
  printf '\n== %s: DISTMUON_NATIVE=%s %s (%s s)\n' "$name" "$native" "$(basename "$program") $*" "$SECONDS" | tee -a "$log"
  # Programs that ignore the signal of timeout are killed 5 seconds later. `finish` ends those whose
  # numbers are in the files.
  DISTMUON_NATIVE=$native bash -c 'echo $$ >"$0"; exec timeout -k 5 "$@"' "$work/$name.pid" "$limit" "${command[@]}" \
    2>&1 </dev/null | tee "$output" | sed -u "s/^/$label/" | tee -a "$log" || status=$?
  rm "$work/$name.pid"
  skipped=$(grep -c 'skipped: ' "$output" || true)
  # 137 is the status of a program that was killed: by timeout, or for its use of memory.
  if [ $status = 124 ] || { [ $status = 137 ] && [ $((SECONDS - begin)) -ge "$limit" ]; }; then
    printf 'ended after %s s: %s\n' "$limit" "$name" | tee -a "$log"
    row "$name" $((SECONDS - begin)) "$(grep -c '^test .* ok$' "$output" || true)" "$skipped" 'ended'
    return
  fi
  # The counts of the last harness, or of the harness inside it, which counts cases. Those of other
  # processes come before. A bench counts as one test.
  read -r passed failed < <(sed -n 's/^test result:.* \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' "$output" | tail -2 | head -1) || {
    passed=$((status == 0)) failed=0
  }
  # A step in which nothing ran has failed.
  [ "$failed" != 0 ] || { [ $status = 0 ] && [ "$passed" != 0 ]; } || failed=1
  row "$name" $((SECONDS - begin)) "$passed" "$skipped" "$failed"
}

row() { printf '| %s | %s | %s | %s | %s |\n' "$@" >>"$work/table"; }

is_requested() { [ ${#requested[@]} = 0 ] || [[ " ${requested[*]} " = *" $1 "* ]]; }

# Succeeds if a step is in the table, and its last cell is not a zero.
has_failed() { grep "^| $1 " "$work/table" | grep -vq '| 0 |$'; }

# Prints the steps of the table whose last cell matches a pattern.
steps_that() { sed -nE "s/^\| (\S+) .*\| ($1) \|$/\1/p" "$work/table" | xargs; }

finish() {
  local name pids broken unfinished
  # First the shells of the steps, which would otherwise add rows, then their programs.
  pids=$(jobs -p && cat "$work"/*.pid 2>/dev/null || true)
  kill $pids $holder 2>/dev/null || true
  for name in $(cut -d' ' -f1 <<<"$plan"); do
    ! is_requested "$name" || grep -q "^| $name " "$work/table" || row "$name" 0 0 0 'not run'
  done
  write_results "${requested[@]}"
  unfinished=$(steps_that 'ended|not run')
  broken=$(steps_that '[1-9][0-9]*')
  [ -z "$unfinished" ] ||
    echo "not done: $unfinished; continue with: gpu.sh run $unfinished (LIMIT=SECONDS for longer steps)"
  [ -z "$broken" ] || echo "failed: $broken; see $log"
  rm -r "$work"
  [ -z "$broken$unfinished" ] || exit 1
}

# Results.

# Prints the name of the GPU and its driver, or the software device.
gpu() { nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1 || echo "$device"; }

# Prints the name of the LLVM library that compiles the kernels. A build may have another one than
# users get.
llvm() {
  local library
  library=$(ldd "$(program gpu_suite)" | grep -o 'libLLVM[^ ]*' | head -1 || true)
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
  local output=$work/$1.out
  [ -e "$output" ] && grep -q '^|' "$output" || return 0
  grep -q '^## ' "$output" || printf '\n## %s\n\n' "$1"
  awk '/^## / { print "\n" $0 "\n" } /^\|/' "$output"
}

usage() {
  sed -n '2,/^set /{/^#/!d;s/^# \?//;p}' "$0"
  exit 2
}

case ${1:-},$# in
  build,1) build ;;
  pack,2) pack "$2" ;;
  preflight,[12])
    [ -z "$packed" ] || refuse "preflight is missing: expected a source tree"
    . "$here/benches/preflight.sh"
    preflight "${2:-}"
    ;;
  host,1)
    . "$here/benches/preflight.sh"
    measure_host
    ;;
  run,*) shift && run "$@" ;;
  start,1) usage ;;
  start,*) shift && start "$@" ;;
  *) usage ;;
esac
