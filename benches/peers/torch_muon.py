"""Times PyTorch's Muon on the shapes of `benches/muon.rs`: one GPT-2 layer.

    pip install torch
    python benches/peers/torch_muon.py [--dtype float32|bfloat16] [--threads N] [--device cpu|cuda]

`torch.optim.Muon` iterates in bfloat16. `--dtype float32` runs the same iteration in float32, by
assigning that type to the name `torch.bfloat16`. A processor without bfloat16 instructions needs
seconds for a step.
"""

import argparse
import statistics
import sys
import time

LAYER = [(768, 768)] * 4 + [(768, 3072), (3072, 768)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("PyTorch is missing: expected the module torch; run pip install torch")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.dtype == "float32":
        torch.bfloat16 = torch.float32

    for name, shapes in [("768x768", LAYER[:1]), ("768x3072", LAYER[4:5]), ("3072x768", LAYER[5:]), ("layer", LAYER)]:
        parameters = [torch.nn.Parameter(torch.randn(s, device=options.device)) for s in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        muon = torch.optim.Muon(parameters, lr=1e-3, weight_decay=0.1)
        times = []
        # The first two steps are the warm-up.
        for _ in range(options.repeats + 2):
            start = time.perf_counter()
            muon.step()
            if options.device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        median = statistics.median(times[2:]) * 1e3
        print(f"torch {torch.__version__} {options.device} {options.dtype} step/{name}: {median:.2f} ms")


if __name__ == "__main__":
    main()
