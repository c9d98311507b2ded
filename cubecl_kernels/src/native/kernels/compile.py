#!/usr/bin/env python3
"""Compiles product.cu to the committed PTX, with NVRTC 13.0: a file for each type of elements and
each generation of kernels.

DISTMUON_CUDA_TOOLS names the folder with NVIDIA's tools (see CONTRIBUTING.md). With `--check`,
only compares. Prints the report of ptxas.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = Path(os.environ["DISTMUON_CUDA_TOOLS"])
FILES = {
    "hopper_bf16.ptx": ["-DONLY_GENERATION=1"],
    "hopper_f16.ptx": ["-DONLY_GENERATION=1", "-DTYPE_F16"],
    "hopper2_bf16.ptx": ["-DONLY_GENERATION=2"],
    "hopper2_f16.ptx": ["-DONLY_GENERATION=2", "-DTYPE_F16"],
}
OPTIONS = ["--gpu-architecture=compute_90a", "--std=c++17"]


def nvrtc():
    # The library loads its builtins by name: loaded before, they are found anywhere.
    ctypes.CDLL(str(next(TOOLS.glob("lib/libnvrtc-builtins.so*"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(TOOLS.glob("lib/libnvrtc.so*"))))


def compiled(lib, options):
    device = (HERE / "device.cuh").read_text()
    source = (HERE / "product.cu").read_text().replace('#include "device.cuh"', device)
    program = ctypes.c_void_p()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = lib.nvrtcCompileProgram(program, len(options), arguments)

    def text(kind):
        size = ctypes.c_size_t()
        getattr(lib, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(lib, f"nvrtcGet{kind}")(program, buffer)
        return buffer.value.decode()

    print(text("ProgramLog"), end="")
    if failed:
        sys.exit(1)
    # ptxas accepts all of the instructions in 8.5, the version of CUDA 12.5, whose driver is the
    # first with the events that order the kernels' work.
    return text("PTX").replace(".version 9.0", ".version 8.5")


def code(ptx):
    lines = (line.strip() for line in ptx.splitlines())
    return [line for line in lines if line and not line.startswith("//")]


def main():
    lib, differs = nvrtc(), False
    for name, definitions in FILES.items():
        ptx = compiled(lib, OPTIONS + definitions)
        path = HERE / name
        if "--check" in sys.argv:
            same = path.exists() and code(path.read_text()) == code(ptx)
            print(f"{path.name}: {'up to date' if same else 'differs from the source'}")
            differs |= not same
        else:
            path.write_text(ptx)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(ptx)
            file.flush()
            command = [TOOLS / "bin/ptxas", "-v", "-arch=sm_90a", "-o", "/dev/null", file.name]
            subprocess.run(command, check=True)
    return differs


if __name__ == "__main__":
    sys.exit(main())
