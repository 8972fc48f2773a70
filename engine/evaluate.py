"""Validation loss over a fixed set of tokens, in a fixed order."""

import torch

from data.order import count_windows
from engine.errors import UserError
from model import IGNORE


def check_split(dataset, split, block_size):
    """UserError unless a split holds at least one window."""
    if count_windows(dataset.n_tokens, block_size) < 1:
        raise UserError(f"the {split} split of {dataset.path} has {dataset.n_tokens:,} tokens, a window of block_size={block_size} "
                        f"takes {block_size + 1:,}: prepare more text, or block_size={max(1, dataset.n_tokens - 1)} would work")


@torch.no_grad()
def evaluate(model, reader, tokens, batch_size, device, precision, stop=None):
    """Mean cross-entropy in nats a token over the first `tokens` tokens, as consecutive windows (at least one).

    Every micro-batch has batch_size rows, the last filled up with rows that carry no labels. None where `stop` turned true.
    """
    n_windows = max(1, min(tokens // reader.block_size, reader.n_windows))
    divisor = n_windows * reader.block_size
    model.eval()
    losses = []
    for start in range(0, n_windows, batch_size):
        x, y = reader.batch(start, min(batch_size, n_windows - start))
        if short := batch_size - len(x):
            x = torch.cat((x, x.new_zeros(short, x.size(1))))
            y = torch.cat((y, y.new_full((short, y.size(1)), IGNORE)))
        with precision.context(device.type):
            losses.append(model(x.to(device), y.to(device), divisor=divisor))
        if stop:
            return None
    return torch.stack(losses).cpu().double().sum().item()
