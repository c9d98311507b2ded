#!/bin/bash
# The tests on LibTorch's CPU device, through Burn's `tch` backend. LibTorch comes from PyTorch's
# wheel for x86-64 Linux: 900 MB to download, 2 GB unpacked. Arguments are passed to `cargo test`;
# without arguments, the tests that depend on the backend run.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${TMPDIR:-/tmp}/distmuon-tch
libtorch=$tools/libtorch

# torch-sys, on which burn-tch builds, accepts this version only. The wheel is linked to these two
# libraries of CUDA even where it uses the processor alone.
if [ ! -e "$libtorch/lib/libtorch.so" ]; then
  python3 -m pip install -q --no-deps --upgrade --target "$tools/wheels" \
    torch==2.9.0 nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90
  mkdir -p "$libtorch/lib"
  ln -sfn "$tools/wheels/torch/include" "$libtorch/include"
  ln -sf "$tools"/wheels/torch/lib/lib{torch_cpu,c10}.so "$tools"/wheels/torch/lib/libgomp* \
    "$tools"/wheels/nvidia/cuda_{runtime,cupti}/lib/*.so.* "$libtorch/lib"
  # The wheel's libtorch.so has no code, but loads all of CUDA: an empty library takes its place.
  cc -shared -x c /dev/null -o "$libtorch/lib/libtorch.so"
fi
export LIBTORCH=$libtorch LD_LIBRARY_PATH=$libtorch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export BURN_DEVICE=tch

on_libtorch() { cargo test --no-default-features --features tch "$@"; }
if [ $# -gt 0 ]; then
  on_libtorch "$@"
  exit
fi
failed=
on_libtorch --test it -- --show-output \
  optimizer:: parts:: orthogonalize:: extremes:: checkpoints:: dist_muon:: || failed=1
on_libtorch --no-fail-fast --test conformance --test distributed --test faults -- --show-output || failed=1
for float in bf16 f64; do
  DISTMUON_TEST_FLOAT=$float on_libtorch --test distributed -- --show-output || failed=1
done
[ -z "$failed" ]
