#!/usr/bin/env python3
"""Runs in PyTorch, which `tests/it/exchange.rs` continues, and the other way round.

    torch_run.py write IMPLEMENTATION FOLDER     writes IMPLEMENTATION-run.safetensors, and
                                                 IMPLEMENTATION-state.safetensors
    torch_run.py continue IMPLEMENTATION FILE RUN     continues from FILE, and compares with RUN

IMPLEMENTATION is `torch`, for `torch.optim.Muon` and `torch.optim.AdamW`; `keller-jordan`, for
`SingleDeviceMuonWithAuxAdam` of the package `muon-optimizer`; or `megatron`, for the `Muon` of the
package `emerging-optimizers`, which Megatron-LM uses, and `torch.optim.AdamW`.

The iteration of Muon is in float32, as in the golden trajectories of the same precision.
Needs torch (2.9 or later) and safetensors; `megatron` needs Python 3.12 or later.
"""

import sys

import torch
from safetensors.torch import load_file, save_file

STEPS, SAVED, LR, TOLERANCE = 6, 3, 0.02, 1e-4
MUON = dict(lr=LR, weight_decay=0.1, momentum=0.95)
ADAMW = dict(lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
# Both always cast to bfloat16, whose rounding would hide an error of a state.
torch.Tensor.bfloat16 = torch.Tensor.float


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.hidden = torch.nn.Linear(10, 10)
        self.norm = torch.nn.LayerNorm(10)


def start(implementation):
    torch.manual_seed(1)
    model = Net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    match implementation:
        case "torch":
            return model, [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)]
        case "keller-jordan":
            from muon import SingleDeviceMuonWithAuxAdam

            groups = [
                dict(params=matrices, use_muon=True, **MUON),
                dict(params=rest, use_muon=False, **ADAMW),
            ]
            return model, [SingleDeviceMuonWithAuxAdam(groups)]
        case "megatron":
            from emerging_optimizers.orthogonalized_optimizers import Muon

            muon = Muon(
                matrices,
                nesterov=True,
                fp32_matmul_prec="highest",
                coefficient_type="simple",
                scale_mode="shape_scaling",
                **MUON,
            )
            return model, [muon, torch.optim.AdamW(rest, **ADAMW)]
    sys.exit(__doc__)


def write(implementation, folder):
    model, optimizers = start(implementation)
    run = {f"init.{n}": p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    for step in range(1, STEPS + 1):
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            run[f"grad.{step}.{name}"] = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        run |= {f"param.{step}.{n}": p.detach().clone() for n, p in model.named_parameters()}
        if step == SAVED:
            path = f"{folder}/{implementation}-state.safetensors"
            export(model, optimizers, path)
            if implementation == "megatron":
                # Megatron-LM counts AdamW's steps in integers, and PyTorch in float32.
                tensors = load_file(path)
                steps = {n: t.long() for n, t in tensors.items() if n.endswith(".step")}
                save_file(tensors | steps, path)
    save_file(run, f"{folder}/{implementation}-run.safetensors")


def export(model, optimizers, path):
    tensors = dict(model.state_dict())
    for optimizer in optimizers:  # such as torch.optim.Muon and torch.optim.AdamW
        for name, p in model.named_parameters():
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def read(model, optimizers, path):
    tensors = load_file(path)
    model.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("optimizer.")})
    parameters = dict(model.named_parameters())
    for optimizer in optimizers:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, tensor in tensors.items():
            path, _, key = name.removeprefix("optimizer.").rpartition(".")
            if id(parameters.get(path)) in owned:
                optimizer.state[parameters[path]][key] = tensor


def continue_from(implementation, path, run):
    model, optimizers = start(implementation)
    read(model, optimizers, path)
    run, worst = load_file(run), 0.0
    for step in range(SAVED + 1, STEPS + 1):
        for name, p in model.named_parameters():
            p.grad = run[f"grad.{step}.{name}"].clone()
        for optimizer in optimizers:
            optimizer.step()
        for name, p in model.named_parameters():
            reference, before = run[f"param.{step}.{name}"], run[f"param.{SAVED}.{name}"]
            error = (p.detach() - reference).norm() / (reference - before).norm()
            worst = max(worst, error.item())
    print(f"largest error {worst:.1e}")
    return worst <= TOLERANCE


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", implementation, folder]:
            write(implementation, folder)
        case ["continue", implementation, path, run]:
            sys.exit(0 if continue_from(implementation, path, run) else 1)
        case _:
            sys.exit(__doc__)
