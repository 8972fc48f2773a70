"""Where a process runs: its device, and the numbers it computes in."""

import contextlib
import sys
from dataclasses import dataclass

import torch

from engine.errors import UserError


def choose_device(requested):
    """The torch.device for `requested` (auto | cpu | cuda | cuda:N | mps); auto takes the fastest there is."""
    if requested == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(name)
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"device={requested}: expected auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={requested}: torch sees {torch.cuda.device_count()} CUDA devices here; device=auto would work")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device={requested}: torch sees no MPS device here; device=auto would work")
    return device


@dataclass
class Precision:
    """What the matrix products are computed in, and whether small gradients need scaling up to survive it."""

    dtype: str
    autocast: torch.dtype | None
    loss_scaling: bool

    def context(self, device_type):
        return torch.autocast(device_type, self.autocast) if self.autocast else contextlib.nullcontext()


def choose_precision(device_type, requested, bf16_supported):
    """The Precision for a device type (cpu, cuda, mps) and a dtype setting; a pure function, so that it has a table test.

    auto: bfloat16 on a CUDA device that has it, else float16 there; float32 on mps and cpu (bfloat16 is slower on a CPU
    without matrix units for it).
    """
    if requested == "auto":
        requested = ("bfloat16" if bf16_supported else "float16") if device_type == "cuda" else "float32"
    if requested == "bfloat16" and device_type == "cuda" and not bf16_supported:
        raise UserError("dtype=bfloat16: this CUDA device does not have it; dtype=float16 or float32 would work")
    if requested == "float32":
        return Precision("float32", None, False)
    return Precision(requested, getattr(torch, requested), requested == "float16")


def start(config):
    """Sets this process up as the config says; returns (device, Precision)."""
    device = choose_device(config.device)
    if config.backend == "nccl" and device.type != "cuda" and "backend" in config.given and config.given["backend"] == "command line":
        raise UserError(f"backend=nccl works on cuda devices, this run is on {device.type}; backend=auto would work")
    if config.threads:
        torch.set_num_threads(config.threads)
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = choose_precision(device.type, config.dtype, bf16)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT: float32 products on the tensor cores
        torch.backends.cudnn.allow_tf32 = True
    config.device, config.dtype = str(device), precision.dtype
    if config.compile is None:
        config.compile = device.type == "cuda"
    return device, precision


def compile_blocks(model, device):
    """torch.compile on each block: one compilation serves all, and parameter names stay plain. Eager, with one warning, where
    the compiler it needs is missing."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()  # on a GPU too: it builds the kernels' launchers
    except Exception as error:
        print(f"warning: compile=True needs a C++ compiler and there is none ({str(error).splitlines()[0]}): running eagerly; "
              "install g++ or clang++ to compile", file=sys.stderr)
        return
    for block in model.blocks:
        block.compile()
