#!/bin/bash
# The checks of `gpu.sh preflight`, which need no GPU. `gpu.sh` reads this file.
#
# CHECKS selects some of them. In a source tree, PROFILE and RUNNER are those of `gpu.sh run`; the
# programs have to be built.

# Bytes that a packed folder may have together with the sources of the tree: a limit of ours, so
# that both can be copied at once.
max_bytes=${MAX_BYTES:-$((62 << 20))}

# All checks, the fastest first.
all_checks='script lists archive probe host_path host stand_in ptx vulkan'

preflight() {
  local check begin status failed=''
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  archive=
  [ -z "$1" ] || {
    # It is unpacked next to itself.
    archive=$work/packed
    mkdir "$archive"
    cp "$1"/{gpu.sh,archive.tar.xz} "$archive"
  }
  cd "${here:?}"
  printf '| check | seconds | result |\n|---|---|---|\n' >"$work/table"
  for check in $all_checks; do
    begin=$SECONDS status=0 reason=$work/$check.reason
    printf '\n== %s\n' "$check"
    if [[ " ${CHECKS:-$all_checks} " = *" $check "* ]]; then
      # In a process of its own, which a command that fails ends. In a condition, it would not.
      set +e
      (set -e; "check_$check")
      status=$?
      set -e
      # A check that is asked for has to run.
      [ ! -e "$reason" ] || [ -z "${CHECKS:-}" ] || status=1
    else
      echo "CHECKS does not name it" >"$reason"
    fi
    if [ -e "$reason" ]; then
      echo "| $check | 0 | skipped: $(cat "$reason") |"
    else
      echo "| $check | $((SECONDS - begin)) | $([ $status = 0 ] && echo ok || echo failed) |"
    fi >>"$work/table"
    [ $status = 0 ] || failed+=" $check"
  done
  printf '\n' && cat "$work/table"
  [ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
}

# Ends a check that cannot run here.
skip() {
  echo "$1" >"$reason"
  exit 0
}

fail() {
  echo "FAIL $1"
  exit 1
}

# Ends a check unless this machine has a command.
needs() { command -v "$1" >/dev/null || skip "$1 is missing"; }

# Writes an executable from standard input.
executable() { cat >"$1" && chmod +x "$1"; }

# Puts a driver that says that there is a GPU of Hopper's kind in front of the machine's commands.
pretend_hopper() {
  mkdir -p "$work/hopper"
  executable "$work/hopper/nvidia-smi" <<'END'
#!/bin/bash
case "$*" in *compute_cap*) echo 9.0 ;; *) echo 'Stand-in, 0' ;; esac
END
  PATH=$work/hopper:$PATH
}

# Every outcome of a step, with programs that only pretend.
check_script() {
  local target=$work/script/target/debug/deps
  mkdir -p "$target" "$work/script/peers"
  executable "$target/gpu_suite-0" <<'END'
#!/bin/bash
result() { echo "test result: $1. $2 passed; $3 failed; 0 ignored"; }
echo "$1 DISTMUON_NATIVE=$DISTMUON_NATIVE"
case $1 in
  product::) result ok 3 0 ;;
  gram::) result FAILED 1 2; exit 101 ;;
  fused::) echo 'test fused::first ... ok'; sleep 60 ;;
  mirror::) result ok 0 0 ;;
  orthogonalize::) echo 'skipped: a reason'; result ok 1 0 ;;
  *) result ok 1 0 ;;
esac
END
  executable "$target/gpu-0" <<'END'
#!/bin/bash
printf '## Times\n| a |\n|---|\n| 1 |\n'
END
  pretend_hopper
  # Instead of the probe, which fails, and of all other programs in Python: for this check only.
  mkdir -p "$work/script/bin"
  PATH=$work/script/bin:$PATH
  executable "$work/script/bin/python3" <<'END'
#!/bin/bash
[[ "$*" != *native_probe.py* ]]
END
  mkdir -p "$work/script/nvvm/libdevice" && touch "$work/script/nvvm/libdevice/libdevice.10.bc"
  script() {
    OUT=$work/script CARGO_TARGET_DIR=$work/script/target PROFILE=dev RUNNER='' TESTS='' CUDA_PATH=$work/script \
      JOBS=3 "$@" bash benches/gpu.sh run "${steps[@]}" >"$work/script/output" 2>&1
  }
  expect() { grep -qE "$1" "$work/script/output" || { cat "$work/script/output"; fail "no line has: $1"; }; }

  local steps=(product gram fused mirror orthogonalize orthogonalize_cubecl launch_times)
  ! script env LIMIT=2 BUDGET=30 BURN_DEVICE=cuda || fail 'steps that failed went unnoticed'
  expect '^\| product \| [0-9]+ \| 3 \| 0 \| 0 \|$'
  expect '^\| gram \| [0-9]+ \| 1 \| 0 \| 2 \|$'
  expect '^\| fused \| [2-9] \| 1 \| 0 \| ended \|$'
  expect '^\| mirror \| [0-9]+ \| 0 \| 0 \| 1 \|$'
  expect '^\| orthogonalize \| [0-9]+ \| 1 \| 1 \| 0 \|$'
  expect '^orthogonalize: orthogonalize:: DISTMUON_NATIVE=must$'
  expect '^orthogonalize_cubecl: orthogonalize:: DISTMUON_NATIVE=off$'
  expect '^not done: fused; continue'
  expect '^failed: gram mirror; see'
  grep -q '^## Times$' "$work"/script/gpu-Stand-in-*.md || fail 'the results lack a table'

  steps=(native orthogonalize orthogonalize_cubecl launch_times)
  ! script env BUDGET=30 BURN_DEVICE=cuda || fail 'a probe that failed went unnoticed'
  expect '^native kernels are wrong: all other steps run without them$'
  expect '^orthogonalize: orthogonalize:: DISTMUON_NATIVE=off$'
  expect '^\| orthogonalize_cubecl \| 0 \| 0 \| 0 \| not needed \|$'
  expect '^failed: native; see'

  steps=(fused product)
  ! script env BUDGET=2 JOBS=1 BURN_DEVICE=vulkan || fail 'a step that did not run went unnoticed'
  expect '^not done: (product fused|fused product); continue|^not done: fused; continue'

  steps=(product launch_times)
  script env BURN_DEVICE=vulkan || { cat "$work/script/output"; fail 'steps that passed count as failed'; }
  steps=(no_such_step)
  ! script env BURN_DEVICE=vulkan || fail 'an unknown step went unnoticed'
  expect 'the step no_such_step is unknown: expected one of product '
  echo 'ok: every outcome of a step is told'
}

# Every step of tests has tests, and every other program of a step can be read.
check_lists() {
  local name way native program arguments count
  needs python3
  python3 -c 'import ast, sys; [ast.parse(open(path).read(), path) for path in sys.argv[1:]]' benches/peers/*.py
  [ -n "$archive" ] || newest gpu_suite >/dev/null || skip 'the program gpu_suite is not built: gpu.sh build'
  pretend_hopper
  local plan
  plan=$(device=cuda steps && device=vulkan steps | grep '^launches ')
  while read -r name way native program arguments; do
    [ "$program" = gpu_suite ] || continue
    count=$(BURN_DEVICE=flex start_program gpu_suite --list $arguments | grep -c ': test$' || true)
    echo "$name ($way, DISTMUON_NATIVE=$native): $count tests"
    [ "$count" != 0 ] || fail "the step $name has no tests: gpu_suite $arguments"
  done <<<"$plan"
}

# Runs a program of the packed folder, or else of the source tree.
start_program() { bash "${archive:-benches}/gpu.sh" start "$@"; }

# The packed folder: its size, and its programs on a machine that has nothing but the essentials.
check_archive() {
  local size tree tool machine=$work/machine file
  [ -n "$archive" ] || skip 'no packed folder is given: gpu.sh preflight DIR'
  size=$(cat "$archive"/{gpu.sh,archive.tar.xz} | wc -c)
  tree=$(git ls-files -co --exclude-standard -z | du -cb --files0-from=- | tail -1 | cut -f1)
  echo "$size bytes are packed, $tree are sources: $((size + tree)) of $max_bytes"
  [ $((size + tree)) -le "$max_bytes" ] || fail 'the packed folder is too large: pack it without DISTMUON_CONFORMANCE_DIR, or copy fewer sources'
  mkdir -p "$machine"/{bin,tmp,packed}
  cp "$archive"/{gpu.sh,archive.tar.xz} "$machine/packed"
  for tool in bash cat cut date dirname basename find flock grep head ldd ls mkdir mktemp mv paste sed sort tail tee timeout touch tr; do
    ln -s "$(command -v $tool)" "$machine/bin/$tool"
  done
  ln -s "$(python3 -c 'import sys; print(sys.executable)')" "$machine/bin/python3"
  bare() { env -i PATH="$machine/bin" HOME=/nonexistent TMPDIR="$machine/tmp" "$@"; }
  bare bash "$machine/packed/gpu.sh" start gpu_suite --list | tail -1
  bare bash "$machine/packed/gpu.sh" start gpu --help | head -1
  for file in "$machine"/packed/bin/*; do
    if bare LD_LIBRARY_PATH="$machine/packed/lib" ldd "$file" | grep 'not found'; then
      fail "libraries of $(basename "$file") are missing"
    fi
  done
  for file in conformance src/checkpoint tests/conformance peers/hopper_bf16.ptx peers/hopper2_bf16.ptx commit; do
    [ -e "$machine/packed/$file" ] || fail "$file is missing in the packed folder"
  done
}

# Compiles the stand-in for the driver, of which native kernels compute and all others do nothing.
build_stand_in() {
  local sources=cubecl_kernels/tests/driver
  needs g++
  [ -e "$work/driver/libcuda.so.1" ] && return
  mkdir -p "$work/driver"
  g++ -std=c++17 -O3 -march=native -fvisibility=hidden -shared -fPIC -o "$work/driver/libcuda.so.1" "$sources"/*.cpp
}

# The probe on the stand-in.
check_probe() {
  needs python3
  python3 -c 'import numpy' 2>/dev/null || skip 'NumPy is missing: pip install numpy'
  build_stand_in
  probe() { LD_LIBRARY_PATH=$work/driver PROBE_SMALL=1 python3 benches/peers/native_probe.py "$@"; }
  probe facts check order time sweep
  probe --candidates facts check launch generations
}

# The host's side of the native kernels, by the tests that the kernels' package has for it, without
# its mutants, which take minutes to compile.
check_host_path() {
  local path
  needs g++
  path=$(newest host) || skip 'the test host of distmuon-kernels is not built'
  (cd cubecl_kernels && LD_LIBRARY_PATH=$(rustc --print sysroot)/lib "$path" --skip mutants)
}

# PTX of all kernels, as CubeCL generates it, through NVIDIA's assembler.
check_ptx() {
  local path
  [ -n "${DISTMUON_CUDA_TOOLS:-}" ] || skip 'DISTMUON_CUDA_TOOLS does not name a folder with ptxas'
  path=$(newest distmuon_kernels) || skip 'the unit tests of distmuon-kernels are not built'
  (cd cubecl_kernels && LD_LIBRARY_PATH=$(rustc --print sysroot)/lib:$DISTMUON_CUDA_TOOLS/lib "$path" cuda_codegen::)
}

# Prints the newest program of a name, as `program` does, but fails silently.
newest() (program "$1" 2>/dev/null)

# The host's part of a step, on the stand-in, whose products do nothing after they were verified.
# A step with more launches than its limit, or with an allocation, fails.
check_host() {
  local libdevice
  libdevice=$(toolkit 2>/dev/null) || skip 'libdevice.10.bc is missing: pip install nvidia-nvvm, or set CUDA_PATH'
  newest gpu >/dev/null || skip 'the program gpu is not built: gpu.sh build'
  build_stand_in
  LD_LIBRARY_PATH=$work/driver CUDA_PATH=$libdevice BURN_DEVICE=cuda bash benches/gpu.sh start gpu host
}

# The same by itself, for its times.
measure_host() {
  work=$(mktemp -d) reason=/dev/stderr
  trap 'rm -rf "$work"' EXIT
  cd "$here"
  check_host
}

# The steps that measure, on the stand-in: CubeCL's server for CUDA, its compiler and Burn run as on
# a GPU, and the results are not looked at. A training looks at some of them, and would refuse
# half precision.
check_stand_in() {
  local libdevice
  libdevice=$(toolkit 2>/dev/null) || skip 'libdevice.10.bc is missing: pip install nvidia-nvvm, or set CUDA_PATH'
  newest gpu >/dev/null || skip 'the program gpu is not built: gpu.sh build'
  build_stand_in
  pretend_hopper
  mkdir -p "$work/stand_in"
  LD_LIBRARY_PATH=$work/driver CUDA_PATH=$libdevice BURN_DEVICE=cuda SMALL=1 OUT=$work/stand_in LIMIT=120 BUDGET=400 \
    RUNNER='' bash benches/gpu.sh run launch_times native_products step_times iterations
}

# Tests and times on a software device, a few of each kind: it compiles every kernel of every shape
# for seconds.
check_vulkan() {
  newest gpu_suite >/dev/null || skip 'the program gpu_suite is not built: gpu.sh build'
  [ -n "${VK_DRIVER_FILES:-}${RUNNER:-}" ] || skip 'no software device: set VK_DRIVER_FILES or RUNNER'
  mkdir -p "$work/vulkan"
  BURN_DEVICE=vulkan OUT=$work/vulkan LIMIT=300 BUDGET=600 TESTS='product::operands_that gram::operands_that
    fused::empty_batches mirror::empty_batches orthogonalize::explains' \
    bash benches/gpu.sh run product gram fused mirror orthogonalize launch_times
}
