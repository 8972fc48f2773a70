"""A model's matrices in the form that a CPU reads fastest, while text is generated.

A product of a few rows is as fast as its matrix can be read. oneDNN's own layout is read in order: for 1 and 8 rows that takes half and
a third of the time of the layout that training uses.
"""

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model import GPT


def cache_dtype(model: "GPT") -> torch.dtype:
    """What keys and values come out as: the autocast type where that is on, else the weights' own."""
    weight = model.wte.weight
    return torch.get_autocast_dtype(weight.device.type) if torch.is_autocast_enabled(weight.device.type) else weight.dtype


@contextlib.contextmanager
def packed_weights(model: "GPT"):
    """Inside, while no gradient is asked for, a CPU multiplies by each matrix in oneDNN's own layout.

    A second copy of the matrices is held meanwhile. Where there is no such layout (other devices, shards, compiled blocks, bfloat16 on a
    processor without AVX-512) or no memory for it, nothing changes.
    """
    weight, dtype = model.wte.weight, cache_dtype(model)
    compiled = any(block._compiled_call_impl is not None for block in model.blocks)
    sharded = hasattr(model, "unshard")  # FSDP's, whether its parameters are gathered at the moment or not
    if (model.packed_head is not None or weight.device.type != "cpu" or sharded or compiled
            or not torch.backends.mkldnn.is_available()
            or not (dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
            or free_memory() < 1.1 * dtype.itemsize * sum(p.numel() for p in model.parameters())):
        yield
        return

    linear_of = torch.ops.mkldnn._linear_pointwise.default  # named in full: looking for the overload takes 2 us, 73 times a token

    def pack(weight, bias):
        blocked, bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype)), None if bias is None else bias.to(dtype)
        return lambda x: linear_of(x.to(dtype), blocked, bias, "none", [], "")

    linears = [m for m in model.modules() if hasattr(m, "packed") and m is not model.head]
    try:
        with torch.no_grad():
            for linear in linears:
                linear.packed = pack(linear.weight, linear.bias)
            model.packed_head = pack(weight if model.head is None else model.head.weight, None)
        yield
    finally:
        model.packed_head = None
        for linear in linears:
            linear.packed = None


def free_memory() -> float:
    """Bytes that can be had without swapping, where the system says so (Linux)."""
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")
