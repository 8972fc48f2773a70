"""Text from a GPT: the cache of its keys and values, the choice of the next token, one batch of prompts or many of any lengths.

Shapes in comments: B batch, T time, S tokens so far, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from data.order import derive_seed
from engine.packed import cache_dtype, packed_weights

if TYPE_CHECKING:
    from model import GPT, Attention


class KVCache:
    """Keys and values of the tokens so far, laid out once: (B, K, size, D) twice a layer.

    `length` counts the tokens held: an int while all rows hold as many, else a list with each row's own. Making it smaller
    cuts the cache back. Rows of one length take any number of tokens at a time, rows of different lengths one.
    """

    def __init__(self, model: GPT, batch_size: int, size: int, dtype: torch.dtype, device: torch.device | str):
        c = model.config
        shape = (c.n_layer, 2, batch_size, c.n_kv_head, size, c.head_dim)
        self.store = torch.zeros(shape, dtype=dtype, device=device)  # a masked value counts 0 times: it must not be NaN
        self.layer = {block.attn: i for i, block in enumerate(model.blocks)}
        self.length: Any = 0  # of all rows, or a list of each one's
        self.size = size

    def row(self, i: int) -> KVCache:
        """An empty cache over the memory of row i."""
        part = copy.copy(self)
        part.store, part.length = self.store[:, :, i:i + 1], 0
        return part

    def move(self, i: int, j: int) -> None:
        """The last of the rows in use, i, becomes row j."""
        self.store[:, :, j], self.length[j] = self.store[:, :, i], self.length[i]
        self.length.pop()

    def grow(self, size: int) -> None:
        """Makes room for `size` tokens a row."""
        old, self.size = self.store, size
        self.store = old.new_zeros(*old.shape[:4], size, old.size(-1))
        self.store[..., :old.size(-2), :] = old

    def begin(self, T: int) -> slice | torch.Tensor:
        """Takes in that T tokens a row come next; returns their positions, as a slice, or (B, 1) where rows differ."""
        device = self.store.device
        if isinstance(self.length, int):
            start, self.stop, self.mask = self.length, self.length + T, None
            if start and T > 1:  # each sees what was there and those before it among the new ones
                self.mask = torch.ones(T, self.stop, dtype=torch.bool, device=device).tril(start)  # (T, S)
            return slice(start, self.stop)
        self.stop = max(self.length) + 1
        self.at = torch.tensor(self.length, device=device)
        self.mask = (torch.arange(self.stop, device=device) <= self.at[:, None])[:, None, None]  # (B, 1, 1, S)
        return self.at[:, None]

    def append(self, attention: Attention, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keeps k, v (B, K, T, D); returns those of all tokens so far, (B, K, S, D), and the mask that attention needs, if any."""
        new = self.store[self.layer[attention]][:, :len(k)]  # rows of different lengths may be fewer than there is room for
        if isinstance(self.length, int):
            new[0, :, :, self.length:self.stop], new[1, :, :, self.length:self.stop] = k, v
        else:
            row = torch.arange(len(k), device=k.device)
            new[0, row, :, self.at], new[1, row, :, self.at] = k[:, :, 0], v[:, :, 0]
        return new[0, :, :, :self.stop], new[1, :, :, :self.stop], self.mask

    def end(self, T: int) -> None:
        """The T tokens are in."""
        self.length = self.stop if isinstance(self.length, int) else [n + T for n in self.length]


def pick(logits: torch.Tensor, uniform: torch.Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> torch.Tensor:
    """Next tokens (B,) from logits (B, V): greedy at temperature 0, else by inverting the distribution at `uniform` (B,).

    The distribution is laid out by token id: in the order of the probabilities two tokens that are nearly even change
    places at the last bit of a logit, and with them everything between.
    """
    if not torch.isfinite(logits.sum()):
        raise FloatingPointError("the model's logits are not finite: its weights are damaged or it has diverged")
    if temperature < 1e-6:  # logits over it would overflow; the likeliest token has all the probability
        return logits.argmax(-1)
    ids = None
    if top_k is not None and top_k < logits.size(-1):
        ids = logits.topk(top_k).indices.sort().values  # (B, top_k)
        logits = logits.gather(1, ids)
    p = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p is not None:  # the smallest set whose probability reaches top_p
        falling, order = p.sort(dim=-1, descending=True, stable=True)
        outside = falling.cumsum(-1) - falling >= top_p
        p = p.masked_fill(outside.scatter(1, order, outside), 0)
    total = p.cumsum(-1)
    chosen = torch.searchsorted(total, uniform.double()[:, None] * total[:, -1:], right=True)
    last = (total < total[:, -1:]).sum(-1, keepdim=True)  # rounding must not reach past the last token with any probability
    chosen = torch.minimum(chosen, last)
    return (chosen if ids is None else ids.gather(1, chosen))[:, 0]


@contextlib.contextmanager
def _generating(model):
    was_training = model.training
    model.eval()
    try:
        with packed_weights(model):
            yield
    finally:
        model.train(was_training)


def _without_gradients(f):
    """inference_mode for a function of a model: it saves a CPU 0.25 ms a token in 12 layers over no_grad, and torchao's float8 layers do not run in it."""
    inference, no_grad = torch.inference_mode()(f), torch.no_grad()(f)

    @functools.wraps(f)
    def run(model, *args, **options):
        return (no_grad if model.float8 else inference)(model, *args, **options)
    return run


@_without_gradients
def generate(model: GPT, tokens: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
             stop_token=None, seed: int = 0, use_cache: bool = True, vocab_size: int | None = None, cache: KVCache | None = None,
             streams: list[torch.Generator] | None = None):
    """Yields the next token of each row, int64 (B,), up to max_new_tokens times; tokens (B, T >= 1) are the prompts.

    Rows that have met stop_token (an id, or several) go on yielding it; the generator ends once all have. The n-th token of
    row i is a function of (seed, i, n) and the logits. Longer than the context: the last block_size tokens are what the
    model sees. Ids from vocab_size (default: the model's) on are never picked. A `cache` that holds the first tokens already
    spares computing those, and is left holding all but the last that was yielded.
    """
    B, size = tokens.size(0), model.config.block_size
    use_cache = use_cache and model.tensor is None  # where ranks share layers they share tokens too, and one is not enough for all
    streams = streams or [random_stream(seed, i) for i in range(B)]
    stops = torch.tensor(_stops(stop_token), dtype=torch.int64, device=tokens.device)
    done = torch.zeros(B, dtype=torch.bool, device=tokens.device)
    tokens = tokens[:, -size:]
    new = tokens if cache is None else tokens[:, cache.length:]
    with _generating(model):
        for _ in range(max_new_tokens):
            if not use_cache or tokens.size(1) >= size:
                # every token's position moves once the window slides: what is cached is of no use any more
                logits = model(tokens, last_only=True)[:, -1]
            else:
                if cache is None:
                    length = min(size, tokens.size(1) + max_new_tokens)
                    cache = KVCache(model, B, length, cache_dtype(model), tokens.device)
                logits = model(new, cache=cache, last_only=True)[:, -1]
            picked = _choose(logits, streams, temperature, top_k, top_p, vocab_size)
            if stop_token is not None:
                picked = torch.where(done, tokens[:, -1], picked)
                done |= torch.isin(picked, stops)
            yield picked
            if done.all():
                return
            new = picked[:, None]
            tokens = torch.cat((tokens, new), dim=1)[:, -size:]


@_without_gradients
def complete(model: GPT, prompts: list[list[int]], max_new_tokens: int, batch_size: int = 8, temperature: float = 1.0, top_k: int | None = None,
             top_p: float | None = None, stop_token=None, seed: int = 0, vocab_size: int | None = None, samples: int = 1):
    """Yields (i, j, ids) as the j-th of `samples` texts that follow the i-th prompt ends: what generate() yields in its row j for
    that prompt alone, but for rounding.

    prompts: lists of ids, of any lengths. Up to batch_size texts are in work, each in a row of the cache at its own length,
    so nothing is padded; where one ends, the next one starts.
    """
    size, device = model.config.block_size, model.wte.weight.device
    options: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, vocab_size=vocab_size)
    stops = _stops(stop_token)
    waiting, rows = deque((i, j) for i in range(len(prompts)) for j in range(samples)), []
    B, longest = min(batch_size, len(waiting)), max(map(len, prompts), default=0)
    cache = KVCache(model, B, min(size, longest + max_new_tokens), cache_dtype(model), device)
    cache.length = []

    def is_whole(text):
        """Whether a text has ended. One that fills the context slides on alone: there is nothing to share with the others."""
        i, _, ids, stream = text
        left = len(prompts[i]) + max_new_tokens - len(ids)
        if left == 0 or len(ids) > len(prompts[i]) and ids[-1] in stops:
            return True
        if len(ids) < size:
            return False
        rest = generate(model, torch.tensor([ids], device=device), left, stop_token=stop_token, streams=[stream], **options)
        ids += [token.item() for token in rest]
        return True

    with _generating(model):
        while waiting or rows:
            while waiting and len(rows) < B:
                i, j = waiting.popleft()
                text = i, j, list(prompts[i]), random_stream(seed, j)
                if len(prompts[i]) < size:
                    part = cache.row(len(rows))
                    logits = model(torch.tensor([prompts[i]], device=device), cache=part, last_only=True)[:, -1]
                    text[2].append(_choose(logits, text[3:], **options).item())
                if is_whole(text):
                    yield i, j, text[2][len(prompts[i]):]
                else:
                    rows.append(text)
                    cache.length.append(len(prompts[i]))
            if not rows:
                return
            last = torch.tensor([[ids[-1]] for _, _, ids, _ in rows], device=device)
            logits = model(last, cache=cache, last_only=True)[:, -1]
            picked = _choose(logits, [stream for *_, stream in rows], **options).tolist()
            for r in reversed(range(len(rows))):
                rows[r][2].append(picked[r])
                if is_whole(rows[r]):
                    i, j, ids, _ = rows[r]
                    yield i, j, ids[len(prompts[i]):]
                    rows[r] = rows[-1]  # the last row takes the place
                    rows.pop()
                    cache.move(len(rows), r)


def _stops(stop_token):
    return [] if stop_token is None else [stop_token] if isinstance(stop_token, int) else list(stop_token)


def random_stream(seed: int, i: int) -> torch.Generator:
    """The random numbers of the i-th text under a seed, whatever else is made beside it."""
    return torch.Generator().manual_seed(derive_seed("sample", seed, i))


def _choose(logits, streams, temperature, top_k, top_p, vocab_size):
    """pick() among the first vocab_size ids, with the next number of each row's stream."""
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in streams])
    where = "cpu" if logits.device.type == "mps" else logits.device  # MPS has no float64
    return pick(logits[:, :vocab_size].to(where), uniform.to(where), temperature, top_k, top_p).to(logits.device)
