"""The GPT: its shape, one block for every family, the loss. (What it says: engine/generate.py.)

As GPT-2 (the defaults): learned positions, LayerNorm before each sub-layer, GELU, a head tied to the embedding,
residual projections initialised smaller. The switches of ModelConfig turn the same block into Llama's or Qwen's.

Shapes in comments: B batch, T time, C channels (n_embd), H query heads, K key/value heads, D head size, V vocabulary.
"""

import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn as nn

from data.order import derive_seed
from engine import matmul, recompute
from engine.attention import attend
from engine.generate import KVCache, complete, generate, pick, random_stream  # part of what a model can do
from engine.loss import linear_cross_entropy

__all__ = ["GPT", "ModelConfig", "KVCache", "complete", "generate", "pick", "random_stream"]


@dataclass
class ModelConfig:
    """The architecture, and nothing else: a checkpoint's weights fit a model of the same ModelConfig."""

    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # fewer than n_head: grouped-query attention (default n_head)
    n_embd: int = 768
    head_dim: int | None = None  # default n_embd / n_head
    mlp_hidden: int | None = None  # default 4 n_embd; swiglu: 8/3 n_embd, rounded up to a multiple of 64
    bias: bool = True  # in every LayerNorm and Linear but the head
    qkv_bias: bool | None = None  # another choice for the projections to queries, keys and values: Qwen2 has biases there alone (default bias)
    o_bias: bool | None = None  # and for attention's output (default bias)
    dropout: float = 0.0
    norm: str = field(default="layernorm", metadata={"choices": ("layernorm", "rmsnorm")})
    norm_eps: float = 1e-5
    pos: str = field(default="learned", metadata={"choices": ("learned", "rope")})
    rope_theta: float = 10000.0
    rope_scaling: float | None = None  # a context so many times as long: frequencies over this factor, all or some; the rest below is of use with it alone
    # which: llama3 and yarn slow long waves alone, linear all of them (position interpolation)
    rope_scaling_type: str = field(default="llama3", metadata={"choices": ("llama3", "linear", "yarn")})
    rope_original_context: int = 8192  # llama3, yarn: tokens that the model was trained on before
    rope_low_freq_factor: float = 1.0  # llama3: waves longer than rope_original_context over this are slowed in full
    rope_high_freq_factor: float = 4.0  # and shorter ones than it over this not at all
    rope_beta_slow: float = 1.0  # yarn: waves that turn fewer times than this in rope_original_context are slowed in full
    rope_beta_fast: float = 32.0  # and those that turn more often than this not at all
    rope_attention_factor: float | None = None  # yarn: what queries and keys are times (default 0.1 ln(rope_scaling) + 1)
    # gelu is the exact one, nanoGPT's; gelu_tanh the approximation that OpenAI's GPT-2 was trained with
    mlp: str = field(default="gelu", metadata={"choices": ("gelu", "gelu_tanh", "swiglu", "relu2")})
    qk_norm: bool = False  # RMSNorm on each head's queries and keys
    tie_embeddings: bool = True

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.qkv_bias is None:
            self.qkv_bias = self.bias
        if self.o_bias is None:
            self.o_bias = self.bias
        if self.head_dim is None:
            self.head_dim = self.n_embd // max(1, self.n_head)
        if self.mlp_hidden is None:
            self.mlp_hidden = -(-8 * self.n_embd // 3 // 64) * 64 if self.mlp == "swiglu" else 4 * self.n_embd

    def problems(self) -> list[str]:
        """Sentences on what cannot be built, none where all is well."""
        found = []
        for f in fields(self):
            value = getattr(self, f.name)
            if choices := f.metadata.get("choices"):
                if value not in choices:
                    found.append(f"{f.name}={value!r}: expected one of {', '.join(choices)}")
            elif f.type in (int, int | None) and value < 1:
                found.append(f"{f.name}={value}: expected a positive integer")
        if found:
            return found
        if self.n_embd % self.n_head and self.head_dim == self.n_embd // self.n_head:  # no head_dim of its own was given
            works = [h for h in range(1, 2 * self.n_head + 1) if self.n_embd % h == 0]
            found.append(f"n_embd={self.n_embd} does not divide by n_head={self.n_head}: n_head of {_listed(works)} would work")
        if self.n_head % self.n_kv_head:
            works = [k for k in range(1, self.n_head + 1) if self.n_head % k == 0]
            found.append(f"n_head={self.n_head} does not divide by n_kv_head={self.n_kv_head}: {_listed(works)} would work")
        if self.pos == "rope" and self.head_dim % 2:
            found.append(f"head_dim={self.head_dim} is odd: rope turns pairs of channels, an even head_dim would work")
        for name in ("rope_theta", "norm_eps", "rope_scaling", "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_slow", "rope_beta_fast",
                     "rope_attention_factor"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                found.append(f"{name}={getattr(self, name)}: expected a number above 0")
        for high, low in (("rope_high_freq_factor", "rope_low_freq_factor"), ("rope_beta_fast", "rope_beta_slow")):
            if getattr(self, high) <= getattr(self, low):
                found.append(f"{high}={getattr(self, high)}: expected a number above {low}={getattr(self, low)}")
        kind, factor = self.rope_scaling_type, self.rope_scaling
        if factor is None and kind != "llama3":
            found.append(f"rope_scaling_type={kind} without rope_scaling, the factor: rope_scaling=4 would work, for a context four times as long")
        elif factor is not None and self.pos != "rope":
            found.append(f"rope_scaling={factor:g} with pos={self.pos}, which has no waves to slow: pos=rope would work")
        elif factor is not None and kind != "llama3" and 0 < factor < 1:
            found.append(f"rope_scaling={factor:g} with rope_scaling_type={kind}: expected at least 1, how many times as long the context gets")
        if kind == "yarn" and 0 < self.rope_theta <= 1:
            found.append(f"rope_theta={self.rope_theta:g} with rope_scaling_type=yarn: expected a number above 1")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout={self.dropout}: expected a number from 0 up to, but not, 1")
        return found

    @property
    def padded_vocab_size(self):
        """Rows of the embedding: a multiple of 64 is what matrix-product kernels like; the extra ones stand for nothing."""
        return -(-self.vocab_size // 64) * 64


def _listed(values):
    values = [str(v) for v in values]
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


class Linear(nn.Linear):
    """(..., in) -> (..., out), by the fastest product there is for it (engine/matmul.py)."""

    packed = None  # another form of the same matrix, while text is generated: see engine/packed.py
    value: bool | None = None  # what matmul.linear is told of it; engine.recompute says when

    def reset_parameters(self):
        """No first values here: they come once, from init_weights or a checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None or torch.is_grad_enabled():
            return matmul.linear(x, self.weight, self.bias, self.value)
        return self.packed(x)


class Embedding(nn.Embedding):
    """(...) int64 -> (..., C)."""

    def reset_parameters(self):
        """No first values here: they come once, from init_weights or a checkpoint."""


class RMSNorm(nn.Module):
    """(..., size) over the root of its mean square, times a weight (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm, of which a product that reads it need not keep the output (engine/matmul.py)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.layer_norm(x, self.weight, self.bias, self.eps)


def make_norm(c: ModelConfig) -> nn.Module:
    """The norm of a ModelConfig over C channels."""
    return RMSNorm(c.n_embd, c.norm_eps) if c.norm == "rmsnorm" else LayerNorm(c.n_embd, c.norm_eps, bias=c.bias)


def rope_table(c: ModelConfig, device: torch.device | str | None = None) -> torch.Tensor:
    """cos and sin of the rotary position embedding (Su et al., arXiv 2104.09864): (2, block_size, head_dim) float32.

    With rope_scaling for a context that is longer than the one a model was trained on before: linear, all frequencies over that factor
    (position interpolation, arXiv 2306.15595); llama3, those of long waves alone, with a linear passage between in frequency
    (arXiv 2407.21783; apply_scaling in Meta's llama-models); yarn, with one in the index of the channel, and queries and keys larger
    (arXiv 2309.00071).
    """
    # 1 / theta^x, not theta^-x: the last bit counts at position 100,000, and checkpoints were trained with this one
    waves = c.rope_theta ** (torch.arange(0, c.head_dim, 2, device=device, dtype=torch.float32) / c.head_dim)  # (D/2,) tokens a radian
    frequency, factor = 1.0 / waves, c.rope_scaling
    if factor is not None and c.rope_scaling_type == "linear":
        frequency = frequency / factor
    elif factor is not None and c.rope_scaling_type == "yarn":
        slowed, kept = 1.0 / (factor * waves), yarn_kept(c, frequency)
        frequency = slowed * (1 - kept) + frequency * kept
    elif factor is not None:
        turns = c.rope_original_context * frequency / (2 * math.pi)  # in the original context
        kept = ((turns - c.rope_low_freq_factor) / (c.rope_high_freq_factor - c.rope_low_freq_factor)).clamp(0, 1)
        frequency = (1 - kept) * frequency / factor + kept * frequency
    angle = torch.outer(torch.arange(c.block_size, device=device, dtype=torch.float32), frequency)  # (T, D/2)
    angle = torch.cat((angle, angle), dim=-1)  # (T, D): the halves rotate as pairs (i, i + D/2), Hugging Face's layout
    table = torch.stack((angle.cos(), angle.sin()))
    if factor is None or c.rope_scaling_type != "yarn":
        return table
    return table * (0.1 * math.log(factor) + 1 if c.rope_attention_factor is None else c.rope_attention_factor)


def yarn_kept(c: ModelConfig, frequency: torch.Tensor) -> torch.Tensor:
    """(D/2,) how much of each frequency (D/2,) YaRN keeps, 0 to 1: a ramp between the channels that turn rope_beta_fast and rope_beta_slow times
    in the original context, both rounded away from each other as in the authors' code."""
    def channel(turns):
        return c.head_dim * math.log(c.rope_original_context / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

    first, last = max(math.floor(channel(c.rope_beta_fast)), 0), min(math.ceil(channel(c.rope_beta_slow)), c.head_dim - 1)
    ramp = (torch.arange(len(frequency), device=frequency.device, dtype=torch.float32) - first) / (last - first or 0.001)
    return 1 - ramp.clamp(0, 1)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turns (B, heads, T, D) by the positions of `rope` (2, T, D)."""
    left, right = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat((-right, left), dim=-1) * rope[1]).type_as(x)


class Attention(nn.Module):
    """Causal self-attention, with grouped queries where n_kv_head < n_head (arXiv 2305.13245): (B, T, C) -> (B, T, C)."""

    def __init__(self, c):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim, self.dropout = c.n_head, c.n_kv_head, c.head_dim, c.dropout
        self.q = Linear(c.n_embd, c.n_head * c.head_dim, bias=c.qkv_bias)
        self.k = Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=c.qkv_bias)
        self.v = Linear(c.n_embd, c.n_kv_head * c.head_dim, bias=c.qkv_bias)
        self.o = Linear(c.n_head * c.head_dim, c.n_embd, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None = None, cache: KVCache | None = None, documents=None) -> torch.Tensor:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, -1, self.head_dim)  # (B, T, H, D), of the heads that are here
        k = self.k(x).view(B, T, -1, self.head_dim)
        v = self.v(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, H, T, D), (B, K, T, D)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        mask = None
        if cache is not None:
            k, v, mask = cache.append(self, k, v)  # (B, K, all so far, D) twice
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, documents)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """The feed-forward part of a block, gated where it is swiglu (arXiv 2002.05202): (B, T, C) -> (B, T, C)."""

    def __init__(self, c):
        super().__init__()
        self.kind = c.mlp
        self.up = Linear(c.n_embd, c.mlp_hidden, bias=c.bias)
        self.gate = Linear(c.n_embd, c.mlp_hidden, bias=c.bias) if c.mlp == "swiglu" else None
        self.down = Linear(c.mlp_hidden, c.n_embd, bias=c.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "swiglu":
            return self.down(matmul.swiglu(self.gate(x), self.up(x)))
        if self.kind == "relu2":
            return self.down(matmul.relu2(self.up(x)))
        return self.down(matmul.gelu(self.up(x), "tanh" if self.kind == "gelu_tanh" else "none"))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream: (B, T, C) -> (B, T, C). Every family has this one block."""

    def __init__(self, c):
        super().__init__()
        self.norm1, self.attn = make_norm(c), Attention(c)
        self.norm2, self.mlp = make_norm(c), MLP(c)
        self.dropout = nn.Dropout(c.dropout) if c.dropout else nn.Identity()
        self.recompute = "none"  # activation checkpointing, one of engine.recompute.KINDS

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None = None, cache: KVCache | None = None, documents=None) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), rope, cache, documents))
        if self.recompute == "selective" and self.training:
            return x + self.dropout(recompute.again(self.feed_forward, self, x, dropout=False))
        return x + self.dropout(self.feed_forward(x))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer of a ModelConfig. Built without first values: init_weights or a checkpoint gives them."""

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.wte = Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.dropout = nn.Dropout(c.dropout) if c.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = make_norm(c)
        self.head = None if c.tie_embeddings else Linear(c.n_embd, c.padded_vocab_size, bias=False)
        self.packed_head = None  # the head's part of packed_weights, whether it is the embedding or not
        self.rope: torch.Tensor | None
        self.register_buffer("rope", rope_table(c) if c.pos == "rope" else None, persistent=False)
        self.context = None  # engine.context_parallel.ContextParallel where ranks share each sequence
        self.tensor = None  # engine.tensor_parallel.TensorParallel where ranks share each layer
        self.softmax = None  # engine.loss.softmax_gradient where it is compiled
        self.float8 = False  # its blocks compute in it: engine/float8.py

    def first_value(self, name: str, shape: tuple, seed: int) -> torch.Tensor:
        """A parameter's first value as in the GPT-2 paper, a function of (seed, its name) alone; on the CPU, the same bits for
        any device and layout."""
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        # what is added to the residual stream is scaled down by the number of additions
        std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith(("o.weight", "down.weight")) else 0.02
        return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(derive_seed("init", seed, name)))

    def first_values(self, seed: int) -> dict:
        """{name: (shape, function of a slice that draws those rows)}: one parameter at a time is ever held whole."""
        return {name: (p.shape, lambda rows, name=name, shape=p.shape: self.first_value(name, shape, seed)[rows]) for name, p in self.named_parameters()}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        for name, p in self.named_parameters():
            p.copy_(self.first_value(name, p.shape, seed))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None, divisor: float = 1.0, cache: KVCache | None = None,
                last_only: bool = False, documents=None, hits: torch.Tensor | None = None) -> torch.Tensor:
        """tokens (B, T) int64, T <= block_size. documents: engine.attention's Documents, where rows hold several texts that
        must not see each other.

        With targets (B, T), IGNORE where there is no label: the sum of the cross-entropies over `divisor`, in nats; and hits (B * T,) bool,
        where given, becomes True where the likeliest token is the target (of ranks that share sequences, each fills in its part).
        Without: logits (B, T, V) float32; with last_only, those of the last position, (B, 1, V).
        """
        if self.context is not None and targets is not None:  # text is generated by each rank alone
            tokens, targets, documents = self.context.cut(tokens, targets, documents)  # (B, T / cp) from here on
        T = tokens.size(1)
        at = slice(0, T) if cache is None else cache.begin(T)  # the tokens' positions; (B, 1) where each row has its own
        if self.tensor is not None:
            tokens = self.tensor.even(tokens)
            at = torch.arange(tokens.size(1), device=tokens.device)[None]
        if documents is not None:
            at = documents.to(tokens.device, dense=self.config.dropout > 0).positions  # (B, T)
        x = self.wte(tokens)  # (B, T, C); (B, T / tp, C) between the layers that ranks share
        if self.wpe is not None:
            x = x + (self.wpe.weight[at] if isinstance(at, slice) else self.wpe(at))
        x = self.dropout(x)
        rope = self.rope[:, at] if self.rope is not None else None  # (2, T, D)
        if rope is not None and rope.dim() == 4:
            rope = rope.unsqueeze(2)  # (2, B, heads, T, D)
        for block in self.blocks:
            if block.recompute == "block" and self.training:
                x = recompute.again(block, block, x, rope, None, documents)
            else:
                x = block(x, rope, cache, documents)
        if cache is not None:
            cache.end(T)
        if self.tensor is not None:
            x = self.tensor.whole(x, T)
        if last_only:
            x = x[:, -1:]
        if targets is not None:
            x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C)
            if documents is not None and documents.labels is not None:  # the head's work is for the others alone
                x, targets = x.index_select(0, documents.labels), targets[documents.labels]
        x = self.norm(x)
        weight = self.wte.weight if self.head is None else self.head.weight  # (padded V, C)
        if self.tensor is not None:
            weight = weight.to_local()  # type: ignore[attr-defined]  # (padded V / tp, C)
        if targets is None and self.tensor is not None:
            return self.tensor.logits(x, weight)[..., :self.config.vocab_size].float()
        if targets is None:
            packed = self.packed_head is not None and not torch.is_grad_enabled()
            return (self.packed_head(x) if packed else matmul.linear(x, weight))[..., :self.config.vocab_size].float()
        found = None if hits is None else hits.new_empty(len(targets))
        loss = linear_cross_entropy(x, weight, targets, self.config.vocab_size, divisor, self.tensor, found, self.softmax)
        if hits is not None:
            at = slice(None) if documents is None or documents.labels is None else documents.labels
            hits[at if self.context is None else documents.among_all(len(tokens))[at]] = found
        return loss

    def flops_per_token(self) -> int:
        """Forward and backward, matrix products only: 6 per weight used, 4 where it is frozen, and attention's 12 L H D T (PaLM, appendix B)."""
        c = self.config
        used: list[torch.Tensor] = [p for n, p in self.named_parameters() if p.dim() == 2 and n not in ("wte.weight", "wpe.weight")]
        if c.tie_embeddings:
            used.append(self.wte.weight)
        return sum((6 if p.requires_grad else 4) * p.numel() for p in used) + 12 * c.n_layer * c.n_head * c.head_dim * c.block_size
