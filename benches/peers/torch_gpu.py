"""Times the products and iterations of `benches/gpu.rs` on a GPU in PyTorch: cuBLAS, Newton-Schulz
(eager, compiled, and compiled with CUDA graphs), and gram-newton-schulz if its wheel is installed.
Prints a table in Markdown.

    python benches/peers/torch_gpu.py [--dtype bfloat16|float16] [--repeats N]
"""

import argparse
import os
import statistics
import sys

# Few, since each is compiled for 5 to 20 seconds: those that matter most first.
SHAPES = [
    (48, 768, 768), (24, 768, 3072), (1, 4096, 4096), (1, 2048, 2048), (16, 1024, 4096), (1, 768, 3072),
    (1, 7168, 18432),
]
POLYNOMIALS = [(3.4445, -4.7750, 2.0315)] * 5
# Shortest time of a measurement in milliseconds, as in benches/gpu.rs.
MIN_MS = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if os.environ.get("BURN_DEVICE", "cuda").lower() != "cuda":
        print("skipped: PyTorch is compared on CUDA only")
        return
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is missing: expected the module torch; run pip install torch")
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU: expected a CUDA device; install a PyTorch for the driver's CUDA")
    dtype = getattr(torch, options.dtype)

    def newton_schulz(x):
        x = x / x.norm(dim=(-2, -1), keepdim=True)
        x = x.to(dtype)
        for a, b, c in POLYNOMIALS:
            r = x @ x.mT
            x = a * x + (b * r + c * r @ r) @ x
        return x

    # Every shape is compiled for itself. PyTorch would otherwise compile the second for all shapes,
    # and after eight compile none.
    torch._dynamo.config.recompile_limit = 2 * len(SHAPES)
    compiled = torch.compile(newton_schulz, dynamic=False)
    graphs = torch.compile(newton_schulz, dynamic=False, mode="reduce-overhead")

    def measure(run, runs: int) -> float:
        """Returns the milliseconds of one run, averaged over several by the device's clock."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs

    def median(run) -> float:
        # These compile and tune, and do not count.
        for _ in range(3):
            measure(run, 1)
        runs = 1
        while measure(run, runs) * runs < MIN_MS:
            runs *= 2
        return statistics.median(measure(run, runs) for _ in range(options.repeats))

    peers = {"eager": newton_schulz, "compiled": compiled, "compiled, CUDA graphs": graphs}
    try:
        from gram_newton_schulz import GramNewtonSchulz

        peers["gram-newton-schulz"] = GramNewtonSchulz()
    except ImportError:
        print("skipped: gram-newton-schulz is not installed")
    print(f"\n## PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {options.dtype}\n")
    print("| shape | X X^T, ms | TFLOP/s | " + " | ".join(f"{name}, ms" for name in peers) + " |")
    print("|---" * (3 + len(peers)) + "|")
    for k, m, n in SHAPES:
        x = torch.randn(k, m, n, device="cuda")
        half = x.to(dtype)
        product = median(lambda: half @ half.mT)
        times = [f"{median(lambda: run(x)):.3f}" for run in peers.values()]
        tflops = 2 * k * m * m * n / product * 1e-9
        print(f"| {k} x {m}x{n} | {product:.3f} | {tflops:.0f} | " + " | ".join(times) + " |", flush=True)


if __name__ == "__main__":
    main()
