#!/bin/bash
# The tests on LibTorch, through Burn's `tch` backend, on the CPU. LibTorch comes from PyTorch's wheel (900 MB to
# download, 2 GB unpacked). Arguments go to `cargo test`; without any, all of the tests run that concern a backend.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${TMPDIR:-/tmp}/distmuon-tch
libtorch=$tools/libtorch

# The version that burn-tch's torch-sys accepts, and the libraries of CUDA that this wheel was linked to.
if [ ! -e "$libtorch/lib/libtorch.so" ]; then
  python3 -m pip install -q --no-deps --upgrade --target "$tools/wheels" \
    torch==2.9.0 nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90
  mkdir -p "$libtorch/lib"
  ln -sfn "$tools/wheels/torch/include" "$libtorch/include"
  ln -sf "$tools"/wheels/torch/lib/lib{torch_cpu,c10}.so "$tools"/wheels/torch/lib/libgomp* \
    "$tools"/wheels/nvidia/cuda_{runtime,cupti}/lib/*.so.* "$libtorch/lib"
  # The wheel's own libtorch.so needs all of CUDA. It has no code: an empty library takes its place.
  cc -shared -x c /dev/null -o "$libtorch/lib/libtorch.so"
fi
export LIBTORCH=$libtorch LD_LIBRARY_PATH=$libtorch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export BURN_DEVICE=tch

[ $# -gt 0 ] || set -- --test optimizer --test conformance --test orthogonalize --test extremes \
  --test checkpoints --test dist_muon --test distributed --no-fail-fast
cargo test --no-default-features --features tch "$@"
