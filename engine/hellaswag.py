"""HellaSwag in the loop: which of four endings of a short text does the model find likeliest (Zellers et al., arXiv 1905.07830)?

The endings come after the text and a space. A choice is the ending whose tokens have the least mean loss, as llm.c scores it and the
GPT-2 and GPT-3 papers normalise by length; the one of least summed loss is told beside it. The file is the authors' own, a JSON object
a line with ctx, endings and label: github.com/rowanz/hellaswag, data/hellaswag_val.jsonl, 10,042 items.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from data.order import IGNORE
from data.sources import require_hub
from engine.errors import UserError
from engine.sync import all_gather
from model import GPT

if TYPE_CHECKING:
    from data.tokenizers import Tokenizer
    from engine.processes import Place, Precision
    from engine.watch import Watch


class Items:
    """Tokens of the items, each a row for every ending. T is the longest row's inputs.

    x, y: (items, endings, T) int64, inputs and targets, IGNORE but for an ending's tokens; labels: (items,), the right endings.
    """

    def __init__(self, rows: list[list[tuple[list[int], int]]], labels: list[int]):
        """rows: for each item a list of (tokens, how many of them are the ending)."""
        T = max(len(tokens) for item in rows for tokens, _ in item) - 1
        self.x = torch.zeros(len(rows), len(rows[0]), T, dtype=torch.int64)
        self.y = torch.full_like(self.x, IGNORE)
        for i, item in enumerate(rows):
            for j, (tokens, ending) in enumerate(item):
                tokens, n = torch.tensor(tokens), len(tokens) - 1
                self.x[i, j, :n] = tokens[:-1]
                self.y[i, j, n - ending:n] = tokens[-ending:]
        self.labels = torch.tensor(labels)
        self.fingerprint = hashlib.sha256(self.x.numpy().tobytes() + self.y.numpy().tobytes() + self.labels.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.labels)


def find_file(name: str) -> str:
    """The path of a .jsonl: of this machine, or OWNER/NAME/FILE.jsonl of a data set on the Hugging Face hub or in its cache."""
    if os.path.isfile(name):
        return name
    owner, _, rest = name.partition("/")
    dataset, _, file = rest.partition("/")
    if os.path.isabs(name) or not file:
        raise UserError(f"hellaswag={name}: there is no such file; expected the path of a .jsonl such as hellaswag_val.jsonl of "
                        "github.com/rowanz/hellaswag, or OWNER/NAME/FILE.jsonl on the Hugging Face hub")
    import huggingface_hub

    download = functools.partial(huggingface_hub.hf_hub_download, repo_id=f"{owner}/{dataset}", filename=file, repo_type="dataset")
    try:
        return download(local_files_only=True)
    except Exception:  # not in its cache
        pass
    try:
        require_hub(name)
        return download()
    except Exception as error:  # of many kinds
        reason = "there is no network" if isinstance(error, UserError) else type(error).__name__
        raise UserError(f"hellaswag={name} is no file here, and {file} of the data set {owner}/{dataset} is not in the Hugging Face cache and cannot be had "
                        f"from the hub ({reason}); expected the path of a .jsonl, or OWNER/NAME/FILE.jsonl") from None


def read_items(name: str, most: int, tokenizer: Tokenizer | None, block_size: int, vocab_size: int) -> Items:
    """The first `most` Items (0: all) of a file, in its order. Rows longer than block_size + 1 tokens lose their start, as a model would read them.

    UserError where there is no tokenizer, or a line is no item with a label.
    """
    if tokenizer is None:
        raise UserError(f"hellaswag={name} is text, and the data set does not say by which tokenizer it was made: one that prepare.py has made would")
    path = find_file(name)
    rows, labels = [], []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if most and len(rows) == most:
                break
            try:
                item = json.loads(line)
                text, endings, label = item["ctx"], item["endings"], int(item["label"])
                if not (isinstance(text, str) and text and all(isinstance(e, str) for e in endings) and 0 <= label < len(endings)
                        and len(endings) == len(rows[0] if rows else endings)):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}, line {number} is no item of HellaSwag: expected JSON with ctx (a text), endings (as many texts in each line) and "
                                "label (the right one's place, from 0; the test split has none)") from None
            start = tokenizer.encode(text)
            each = [tokenizer.encode(" " + ending) for ending in endings]
            rows.append([((start + ending)[-block_size - 1:], min(len(ending), block_size)) for ending in each])
            labels.append(label)
    if not rows:
        raise UserError(f"{path} is empty: expected items of HellaSwag, a line each")
    if (top := max(max(tokens) for item in rows for tokens, _ in item)) >= vocab_size:
        raise UserError(f"{path} has id {top} by the {tokenizer.name} tokenizer, the model's vocabulary ends at {vocab_size - 1}")
    return Items(rows, labels)


@torch.no_grad()
def choose(model: GPT, items: Items, batch_size: int, place: Place, precision: Precision, watch: Watch) -> torch.Tensor | None:
    """(items, 2) int64 on every rank: the ending of least mean loss and that of least summed loss of each item; None where all ranks have been told
    to stop.

    A batch holds whole items, about batch_size rows. Ranks take batches in turn, those that share layers the same, and one without a batch
    left runs the first again: sharded layers need it. A batch holds the same items on any count of ranks.
    """
    each = max(1, batch_size // items.x.size(1))
    n_batches, turn, turns = -(-len(items) // each), place.rank // place.tp, place.ranks // place.tp
    model.eval()
    chosen = []
    for i in range(turn, -(-n_batches // turns) * turns, turns):
        if watch.here():
            return None
        first = i * each if i < n_batches else 0
        x, y = (t[first:first + each].flatten(0, 1).to(place.device) for t in (items.x, items.y))  # (rows, T)
        with precision.context(place.device.type):
            logits = model(x)  # (rows, T, V)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="none").view(y.shape).sum(1)  # (rows,)
        by_sum = losses.view(-1, items.x.size(1))  # (items, endings)
        by_mean = by_sum / (y != IGNORE).sum(1).view(by_sum.shape)
        found = torch.stack((by_mean.argmin(1), by_sum.argmin(1)), 1)
        chosen.append(F.pad(found, (0, 0, 0, each - len(found))))  # (each, 2): the last batch may hold fewer
    chosen = torch.stack(chosen)
    if place.ranks > 1:
        chosen = all_gather(chosen)[::place.tp].transpose(0, 1)  # (turns, batches, ...) -> in the order of the items
    return chosen.reshape(-1, 2)[:len(items)].cpu()


def score(model: GPT, items: Items, batch_size: int, place: Place, precision: Precision, watch: Watch) -> dict[str, float] | None:
    """{acc_norm, acc, items}: the shares of items whose right ending has the least mean loss, and the least summed loss; None where all stop."""
    chosen = choose(model, items, batch_size, place, precision, watch)
    if chosen is None:
        return None
    acc_norm, acc = (chosen == items.labels[:, None]).double().mean(0).tolist()
    return {"acc_norm": acc_norm, "acc": acc, "items": len(items)}
