"""Validation loss, and the answers that are right, over a fixed set of tokens, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from data.order import IGNORE, WindowReader, count_windows
from data.packing import MixedReader
from data.shards import TokenDataset
from engine.attention import Documents
from engine.errors import UserError
from engine.sync import all_gather, of_groups
from engine.transfer import to_device

if TYPE_CHECKING:
    from engine.processes import Place, Precision
    from engine.watch import Watch
    from model import GPT

Reader = WindowReader | MixedReader


def check_split(dataset: TokenDataset, split: str, block_size: int) -> None:
    """UserError unless a split holds at least one window."""
    if count_windows(dataset.n_tokens, block_size) < 1:
        raise UserError(f"the {split} split of {dataset.path} has {dataset.n_tokens:,} tokens, a window of block_size={block_size} "
                        f"takes {block_size + 1:,}: prepare more text, or block_size={max(1, dataset.n_tokens - 1)} would work")


def windows_of(reader: Reader, tokens: int) -> int:
    """How many windows an evaluation over so many tokens takes."""
    return max(1, min(tokens // reader.block_size, reader.n_windows))


@torch.no_grad()
def evaluate(model: GPT, reader: Reader, tokens: int, batch_size: int, place: Place, precision: Precision, watch: Watch,
             answers: bool = False) -> dict[str, float] | None:
    """{"loss": mean cross-entropy in nats a labelled token} over the first `tokens` tokens, as consecutive windows or rows of records (at
    least one). With `answers` also "answers", how many there are, and "accuracy", the share of them that are right.

    Every micro-batch has batch_size rows, the last filled up with rows that carry no labels. Ranks take them in turn, and one
    without a micro-batch left runs an empty one: sharded layers need it. The same numbers for any count of ranks.
    None where all ranks have been told to stop.
    """
    n_windows = windows_of(reader, tokens)
    divisor = max(1, reader.labels(0, n_windows))
    n_batches = -(-n_windows // batch_size)
    model.eval()
    losses, right = [], torch.zeros(2, dtype=torch.int64)
    for i in range(place.group, -(-n_batches // place.groups) * place.groups, place.groups):
        if watch.here():
            return None
        x, y, documents = reader.batch(min(i * batch_size, n_windows), max(0, min(batch_size, n_windows - i * batch_size)), rows=batch_size)
        hits = torch.zeros(y.numel(), dtype=torch.bool, device=place.device) if answers else None
        with precision.context(place.device.type):
            losses.append(model(to_device(x, place.device), to_device(y, place.device), divisor=divisor, documents=documents, hits=hits))
        if answers:
            if place.cp > 1:  # an answer may lie on several ranks
                hits = all_gather(hits.byte(), place.context_group).amax(0).bool()
            right += right_answers(hits.cpu(), y, documents)
    losses = torch.stack(losses)
    if place.ranks > 1:
        losses = of_groups(all_gather(losses), place).t().flatten()[:n_batches]  # (groups, each) -> in the order of the windows
        right = all_gather(right.to(place.device))[::place.cp * place.tp].sum(0)  # ranks of a group have counted the same
    found = {"loss": losses.cpu().double().sum().item()}
    return {**found, "answers": right[1].item(), "accuracy": right[0].item() / right[1].item()} if answers else found


def right_answers(hits: torch.Tensor, targets: torch.Tensor, documents: Documents) -> torch.Tensor:
    """(answers that are right, answers), int64. An answer is a run of labels (B, T) within a document, and right where all of its tokens
    are hits (B * T,): greedy decoding then gives it to its last token, which ends the turn. What was said before it is as in the record."""
    labelled, ids = (targets != IGNORE).flatten(), documents.ids().flatten()
    goes_on = labelled[:-1] & (ids[:-1] == ids[1:])
    first = labelled.clone()
    first[1:] &= ~goes_on
    number = first.cumsum(0)[labelled] - 1
    missed = torch.zeros(int(first.sum()), dtype=torch.int64).index_add_(0, number, (~hits[labelled]).long())
    return torch.stack(((missed == 0).sum(), first.sum()))
