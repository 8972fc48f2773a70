"""Causal attention, over whole rows or kept inside each of the documents that share them.

On a CPU documents are cut out and attended one by one, which does their own work and no more; on CUDA it is FlexAttention
(arXiv 2412.05496), whose kernels pass over the blocks that a mask leaves empty; elsewhere a mask of T x T says what may be seen.
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F

from engine.context_parallel import Part
from engine.transfer import to_device


class Documents:
    """Where the documents of a batch lie: attention is kept inside each, and each one's positions start at 0.

    lengths: of consecutive pieces of the batch's tokens, row after row, (pieces,) integers; no piece crosses the end of a row.
    padding: which of the pieces are padding, (pieces,) bool (default: none); theirs is no attention that anybody looks at.
    labels: the positions among the B * T that bear a label, (n,) int64, where the loss need not look at the others (default: all).
    """

    def __init__(self, lengths, rows, padding=None, labels=None):
        self.lengths, self.rows = np.asarray(lengths, dtype=np.int64), rows
        self.padding = np.zeros(len(self.lengths), bool) if padding is None else np.asarray(padding)
        starts = np.cumsum(self.lengths) - self.lengths
        self.positions = torch.from_numpy(np.arange(self.lengths.sum()) - np.repeat(starts, self.lengths)).view(rows, -1)  # (B, T)
        self.labels, self.mask, self.flex = labels, None, None

    @functools.cached_property
    def runs(self):
        """[(documents, length of each, whether they are padding)]: neighbours of one length go through one call."""
        runs = []
        for length, padding in zip(self.lengths.tolist(), self.padding.tolist()):
            if runs and runs[-1][1:] == (length, padding):
                runs[-1] = (runs[-1][0] + 1, length, padding)
            else:
                runs.append((1, length, padding))
        return runs

    def ids(self):
        """(B, T) int64: each token's document."""
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths)), self.lengths)).view(self.rows, -1)

    def to(self, device, dense=False):
        """Moves what the model needs to its device and makes the mask, once for all layers. dense: FlexAttention cannot do it
        (dropout). Returns itself."""
        device = torch.device(device)
        self.positions = to_device(self.positions, device)
        if self.labels is not None:
            self.labels = to_device(self.labels, device)
        if device.type != "cpu" and self.mask is None:
            ids = to_device(self.ids(), device)
            if dense or device.type != "cuda" or not torch.backends.cuda.flash_sdp_enabled():  # attention=plain
                self.mask = dense_mask(ids)
            else:  # both here: blocks that are compiled find them ready
                self.mask, self.flex = block_mask(ids, compiled=True), flex_attention()
        return self


def causal_within(ids):
    """FlexAttention's mask function for documents told by ids (B, T)."""
    return lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k])


def block_mask(ids, compiled):
    """FlexAttention's BlockMask; `compiled`, the (B, T, T) of it never exist."""
    from torch.nn.attention.flex_attention import create_block_mask

    make = torch.compile(create_block_mask) if compiled else create_block_mask
    return make(causal_within(ids), ids.size(0), None, ids.size(1), ids.size(1), device=ids.device)


def dense_mask(ids):
    """(B, 1, T, T) bool: whether the query may see the key."""
    return (ids[:, :, None] == ids[:, None, :]).tril()[:, None]


@functools.cache
def flex_attention():
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # not compiled, it would write the scores out


def attend(q, k, v, mask=None, dropout=0.0, documents=None):
    """q (B, H, T, D), k and v (B, K, S, D) with K dividing H -> (B, H, T, D).

    Causal, but where a mask (broadcast to (B, H, T, S) bool) says what is seen, or one new token sees all S. With documents (S = T):
    causal inside each of them, or with the part of each sequence that this rank holds, to keys on other ranks too.
    """
    options = dict(dropout_p=dropout, enable_gqa=q.size(1) != k.size(1))
    if isinstance(documents, Part):
        return documents.attend(q, k, v)
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=q.size(2) > 1 and mask is None, **options)
    if documents.mask is None:
        return attend_in_pieces(q, k, v, documents, options)
    if isinstance(documents.mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents.mask, **options)
    return documents.flex(q, k, v, block_mask=documents.mask, enable_gqa=options["enable_gqa"])


def attend_in_pieces(q, k, v, documents, options):
    """attend() of documents, those of one length together: nothing is computed that is masked."""
    B, H, T, D = q.shape
    runs = documents.runs
    sizes = [count * length for count, length, _ in runs]
    # split's backward is one concatenation, where slices would each fill a gradient of the whole
    cut = [t.transpose(1, 2).flatten(0, 1).split(sizes) for t in (q, k, v)]  # of (B * T, heads, D)
    out = []
    for (count, length, padding), *parts in zip(runs, *cut):
        if padding:
            out.append(parts[0].new_zeros(count * length, H, D))
            continue
        parts = [t.unflatten(0, (count, length)).transpose(1, 2) for t in parts]  # (documents, heads, length, D)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=length > 1, **options)
        out.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(out).view(B, T, H, D).transpose(1, 2)
