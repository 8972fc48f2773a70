"""Context parallelism: the ranks of a group hold a part of every sequence each, for sequences that do not fit one device.

Of a sequence in 2 cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r: a token late in a sequence looks at many before it, an early
one at few, and so every rank has the same work (Llama 3, arXiv 2407.21783, section 3.3.2). All but attention works on tokens one by
one. In attention a rank gathers the keys and values of the whole sequence, a layer at a time, and again in the backward, where it
also sends their gradients home; grouped queries make them small. It computes blocks of queries by keys with the flash kernel of the
device, which never writes the scores down, and merges blocks by the log-sum-exp of their scores: exact, whatever the cuts.
"""

import contextlib

import torch
import torch.distributed as dist

from engine.communication import about
from engine.errors import UserError
from engine.transfer import to_device


class ContextParallel:
    """One rank's place in a group whose ranks share sequences."""

    def __init__(self, group, waiting=contextlib.nullcontext):
        """waiting: makes a context that is entered while the others' keys and values are waited for."""
        self.group, self.size, self.rank, self.waiting = group, dist.get_world_size(group), dist.get_rank(group), waiting

    def cut(self, tokens: torch.Tensor, targets: torch.Tensor, documents=None) -> tuple:
        """A batch (B, T), T a multiple of 2 cp, and where documents lie in it -> this rank's tokens and targets (B, T / cp), and its Part."""
        part = Part(self, tokens.size(1), documents)
        at = part.at.to(tokens.device)
        return tokens[:, at], targets[:, at], part


class Part:
    """Which tokens of each sequence a rank holds, `at` (T / cp,) int64, and which of their queries meet which keys; what
    engine.attention.Documents is where ranks hold whole sequences, for whole rows too.

    runs: [(rows, slice of the rank's own tokens, first key, position of the first of these tokens)]: the tokens of a run see all keys from
    the first one up to their own position, and themselves causally.
    """

    def __init__(self, context, T: int, documents=None):
        self.context, self.chunk = context, T // (2 * context.size)
        starts = [context.rank * self.chunk, (2 * context.size - 1 - context.rank) * self.chunk]
        self.at = torch.cat([torch.arange(s, s + self.chunk) for s in starts])
        self.positions, self.labels, self.padded = self.at[None], None, False  # (1 or B, T / cp)
        if documents is not None:
            self.positions, self.padded = documents.positions[:, self.at], bool(documents.padding.any())
            if documents.labels is not None:
                labelled = torch.zeros(documents.positions.numel(), dtype=torch.bool)
                labelled[documents.labels] = True
                self.labels = labelled.view_as(documents.positions)[:, self.at].flatten().nonzero()[:, 0]
        self.runs = []
        for i, chunk in enumerate(starts):
            for rows, start, stop in pieces(T, documents):
                first, behind = max(start, chunk), min(stop, chunk + self.chunk)
                if first < behind:
                    own = i * self.chunk - chunk  # from a position to the place among this rank's tokens
                    self.runs.append((rows, slice(first + own, behind + own), start, first))

    def to(self, device, dense=False):
        """Moves what the model needs to its device."""
        self.positions = to_device(self.positions, device)
        if self.labels is not None:
            self.labels = to_device(self.labels, device)
        return self

    def among_all(self, B: int) -> torch.Tensor:
        """Where this rank's tokens (B, T / cp) lie among the B * T of whole sequences, (B * T / cp,) int64."""
        at = self.at.to(self.positions.device)
        return (torch.arange(B, device=at.device)[:, None] * (2 * self.context.size * self.chunk) + at).flatten()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of this rank's queries (B, H, T / cp, D) to all keys before them: its k, v (B, K, T / cp, D) and the others'."""
        return _Attention.apply(q, k, v, self)

    @about("keys and values")
    def gather(self, k: torch.Tensor, v: torch.Tensor):
        """Starts to gather keys and values; what is returned waits for them: (B, K, T, D) twice."""
        own = torch.stack((k, v))  # (2, B, K, T / cp, D)
        all_of_them = own.new_empty(self.context.size, *own.shape)
        work = dist.all_gather_single(all_of_them.view(-1), own.view(-1), group=self.context.group, async_op=True)

        def wait():
            with self.context.waiting():
                work.wait()
            head, tail = all_of_them.unflatten(-2, (2, self.chunk)).unbind(-3)  # (cp, 2, B, K, chunk, D) twice
            chunks = torch.cat((head, tail.flip(0)))  # (2 cp, 2, B, K, chunk, D) in the order of the sequence
            return chunks.movedim(0, 3).flatten(3, 4).unbind()
        return wait

    @about("keys and values")
    def send_home(self, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of all keys and values (B, K, T, D), of which each rank has its queries' share -> their sums for this rank's own."""
        chunks = torch.stack((dk, dv)).unflatten(3, (2 * self.context.size, self.chunk)).movedim(3, 0)  # (2 cp, 2, B, K, chunk, D)
        head, tail = chunks.chunk(2)
        parts = torch.stack((head, tail.flip(0)), dim=-3).flatten(-3, -2)  # (cp, 2, B, K, T / cp, D)
        own = parts.new_empty(parts.shape[1:])
        dist.reduce_scatter_single(own.view(-1), parts.view(-1), group=self.context.group)
        return own[0], own[1]


def pieces(T: int, documents) -> list[tuple[slice, int, int]]:
    """[(rows, start, stop)] of the pieces inside which attention is kept, positions counted in the row; none for padding."""
    if documents is None:
        return [(slice(None), 0, T)]
    found, at = [], 0
    for length, padding in zip(documents.lengths.tolist(), documents.padding.tolist()):
        if not padding:
            found.append((slice(at // T, at // T + 1), at % T, at % T + length))
        at += length
    return found


class _Attention(torch.autograd.Function):
    """Blocks on the diagonal need no other rank's keys: they are computed while those are on their way."""

    @staticmethod
    def forward(ctx, q, k, v, part):
        wait = part.gather(k, v)
        new = torch.zeros_like if part.padded else torch.empty_like
        out, lse = new(q), new(q[..., 0], dtype=torch.float32)
        for rows, own, _, _ in part.runs:
            i = rows, slice(None), own
            out[i], lse[i] = flash(q[i], k[i], v[i], causal=True)
        keys, values = wait()
        for rows, own, start, first in part.runs:
            if start < first:
                i, before = (rows, slice(None), own), (rows, slice(None), slice(start, first))
                merge(out[i], lse[i], *flash(q[i], keys[before], values[before], causal=False))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.part = part
        return out

    @staticmethod
    def backward(ctx, d_out):
        (q, k, v, out, lse), part = ctx.saved_tensors, ctx.part
        wait = part.gather(k, v)
        new = torch.zeros_like if part.padded else torch.empty_like
        dq, dk, dv = (new(t, dtype=torch.float32) for t in (q, k, v))
        for rows, own, _, _ in part.runs:
            i = rows, slice(None), own
            dq[i], dk[i], dv[i] = flash_backward(d_out[i], q[i], k[i], v[i], out[i], lse[i], causal=True)
        keys, values = wait()
        d_keys, d_values = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (keys, values))
        for rows, own, start, first in part.runs:
            if start < first:
                i, before = (rows, slice(None), own), (rows, slice(None), slice(start, first))
                grads = flash_backward(d_out[i], q[i], keys[before], values[before], out[i], lse[i], causal=False)
                for total, more in zip((dq[i], d_keys[before], d_values[before]), grads):
                    total += more
        home = part.send_home(d_keys.to(k.dtype), d_values.to(k.dtype))
        return dq.to(q.dtype), (dk + home[0]).to(k.dtype), (dv + home[1]).to(v.dtype), None


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Adds the attention to other keys: out, lse become those over the keys of both, in place."""
    both = torch.logaddexp(lse, more_lse)
    out.copy_(out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None])
    lse.copy_(both)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, log-sum-exp of the scores (B, H, Tq) float32) of q (B, H, Tq, D) on k, v (B, K, Tk, D)."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def flash_backward(d_out, q, k, v, out, lse, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of one block of keys, with `out` and `lse` those over all keys (Dao, arXiv 2307.08691, algorithm 2)."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, q, k, v, out, lse, 0.0, causal)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the state of dropout's random numbers
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, unused, unused)  # None: where sequences begin, were they of several lengths


def check_context(config, place) -> None:
    """UserError where the settings of a run do not fit context parallelism."""
    c, problems = config, []
    if c.block_size % (2 * c.cp):
        down = c.block_size // (2 * c.cp) * 2 * c.cp
        works = " or ".join(str(b) for b in (down, down + 2 * c.cp) if b)
        problems.append(f"block_size={c.block_size} does not divide by 2 * cp = {2 * c.cp}, a head and a tail part for each rank: block_size={works} would work")
    if c.dropout:
        problems.append(f"dropout={c.dropout} with cp={c.cp}: which numbers are dropped would follow the cut of the sequence, another curve for each cp; "
                        "dropout=0 would work, or cp=1")
    if c.attention == "plain":
        problems.append(f"attention=plain with cp={c.cp}: parts are merged by what the flash kernels alone give; attention=auto would work, or cp=1")
    if c.device == "cuda" and c.dtype == "float32":
        problems.append(f"dtype=float32 with cp={c.cp}: the flash kernels of a GPU compute in half precision; dtype=bfloat16 would work")
    head_dim = c.head_dim or c.n_embd // max(1, c.n_head)
    if c.device == "cuda" and (head_dim % 8 or head_dim > 256):
        works = " or ".join(str(d) for d in (head_dim // 8 * 8, head_dim // 8 * 8 + 8) if 0 < d <= 256) or "256"
        problems.append(f"head_dim={head_dim} with cp={c.cp}: the flash kernels of a GPU take multiples of 8, 256 at most; head_dim={works} would work")
    if problems:
        raise UserError(*problems)
