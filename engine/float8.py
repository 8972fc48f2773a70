"""The blocks' matrix products in float8, by torchao: twice bfloat16's arithmetic on GPUs that have it (Micikevicius and others, arXiv 2209.05433).

Weights, gradients and what is saved stay as they are; both sides of a product are scaled by their largest value and rounded as they
enter it. The head and the loss stay in bfloat16.
"""

import importlib.util

import torch

from engine.errors import UserError

NEEDS = 8, 9  # CUDA compute capability: Ada, Hopper and later
MULTIPLE = 16  # what every side of a product must be a multiple of
INSTALL = "pip install torchao==0.18.0"  # for torch 2.11 and later


def check_float8(config, device: torch.device) -> None:
    """UserError where float8=True cannot work with the other settings, on this device, with what is installed."""
    c, problems = config, []
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < NEEDS:
        here = f"a GPU of {'.'.join(map(str, capability))}" if capability else f"device {device.type}"
        problems.append(f"float8 needs a CUDA GPU of compute capability {'.'.join(map(str, NEEDS))} or more (Ada, Hopper), this is {here}: "
                        "float8=False would work")
    elif importlib.util.find_spec("torchao") is None:
        problems.append(f"float8 needs torchao, which is not installed: {INSTALL}, or float8=False would work")
    elif c.dtype != "bfloat16":
        problems.append(f"float8 with dtype={c.dtype}: what is not in float8 is in bfloat16; dtype=bfloat16 would work")
    for key, why, works in (("lora_rank", "the adapted matrices are frozen and their adapters small", 0), ("tp", "a rank's part of a layer is not converted", 1),
                            ("deterministic", "its rounding follows whether a layout casts weights before", False)):
        if getattr(c, key) > works:
            problems.append(f"float8 with {key}={getattr(c, key)}: {why}; {key}={works} would work, or float8=False")
    if problems:
        raise UserError(*problems)


def check_tokens(config) -> None:
    """UserError where a rank's tokens of a micro-batch are no multiple of what the products need."""
    tokens = config.batch_size * config.block_size // config.cp
    if tokens % MULTIPLE:
        raise UserError(f"float8 with batch_size * block_size / cp = {tokens} tokens at a time: a multiple of {MULTIPLE} would work")


def use_float8(model, config) -> None:
    """Swaps the blocks' matrices, those whose sides are multiples of MULTIPLE, for torchao's, which keep their parameters and names."""
    if config.float8:
        from torchao.float8 import convert_to_float8_training
        model.float8 = True
        convert_to_float8_training(model.blocks, module_filter_fn=lambda linear, name: linear.in_features % MULTIPLE == linear.out_features % MULTIPLE == 0)
