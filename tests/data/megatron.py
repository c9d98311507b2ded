#!/usr/bin/env python3
"""A checkpoint of Megatron-LM (`--ckpt-format torch_dist`) as a safetensors file.

    megatron.py convert FOLDER FILE STEPS     writes FILE, with the number of Adam's steps
    megatron.py check                         converts a folder that it writes itself

Needs torch (2.9 or later) and safetensors, and not Megatron-LM.
"""

import re
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

STATES = "momentum_buffer|exp_avg|exp_avg_sq|fp32_param"


def convert(folder, path, steps):
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries
        if hasattr(entry, "size")  # the others are bytes, such as settings
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    file = {}
    for name, tensor in tensors.items():
        # Megatron-LM chains the optimizers of matrices and of all others.
        name = re.sub(r"(^|\.)chained_\d+\.", r"\1", name)
        state = re.fullmatch(rf"optimizer\.state\.({STATES})\.(.+)", name)
        if name.startswith("optimizer.") and not state:
            sys.exit(f"{name} is not known: save with parameters of their own shapes")
        for name, part in layers(state[2] if state else name, tensor):
            file[f"optimizer.{name}.{state[1]}" if state else name] = part.contiguous()
            if state and state[1] == "exp_avg":
                file[f"optimizer.{name}.step"] = torch.tensor(steps)
    save_file(file, path)


def layers(name, tensor):
    """Layers of one kind are one tensor, whose name has no number."""
    stacked = re.fullmatch(r"(.*\blayers\.)(\D.*)", name)
    if not stacked:
        return [(name, tensor)]
    return [(f"{stacked[1]}{i}.{stacked[2]}", part) for i, part in enumerate(tensor)]


def check():
    def random(*shape):
        return torch.randn(shape)

    weights, momenta = random(2, 4, 3), random(2, 4, 3)
    table, moments = random(7, 3), [random(7, 3), random(7, 3).square()]
    with tempfile.TemporaryDirectory() as folder:
        tensors = {
            "decoder.layers.mlp.linear_fc2.weight": weights.bfloat16(),
            "embedding.word_embeddings.weight": table.bfloat16(),
            "optimizer.chained_0.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight": momenta,
            "optimizer.chained_0.state.fp32_param.decoder.layers.mlp.linear_fc2.weight": weights,
            "optimizer.state.exp_avg.embedding.word_embeddings.weight": moments[0],
            "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight": moments[1],
            "chained_1.optimizer.state.fp32_param.embedding.word_embeddings.weight": table,
            "optimizer.param_groups": [{"lr": 0.02}],
            "rng_state": b"other",
        }
        dcp.save(tensors, checkpoint_id=f"{folder}/iter", no_dist=True)
        convert(f"{folder}/iter", f"{folder}/file", 10)
        file = load_file(f"{folder}/file")
    expected = {
        "embedding.word_embeddings.weight": table.bfloat16(),
        "optimizer.embedding.word_embeddings.weight.exp_avg": moments[0],
        "optimizer.embedding.word_embeddings.weight.exp_avg_sq": moments[1],
        "optimizer.embedding.word_embeddings.weight.fp32_param": table,
        "optimizer.embedding.word_embeddings.weight.step": torch.tensor(10),
    }
    for i in range(2):
        name = f"decoder.layers.{i}.mlp.linear_fc2.weight"
        expected |= {
            name: weights[i].bfloat16(),
            f"optimizer.{name}.momentum_buffer": momenta[i],
            f"optimizer.{name}.fp32_param": weights[i],
        }
    assert file.keys() == expected.keys(), file.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == file[name].dtype and tensor.equal(file[name]), name


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["convert", folder, path, steps]:
            convert(folder, path, int(steps))
        case ["check"]:
            check()
        case _:
            sys.exit(__doc__)
