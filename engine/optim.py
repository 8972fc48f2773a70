"""Parameter groups, AdamW, Muon, gradient clipping, learning-rate schedules, loss scaling for float16."""

import math

import torch
from torch.optim.adamw import adamw

from engine.matmul import mm
from engine.sync import Owners, local


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101) over named parameters, by torch.optim's own kernels.

    It is torch.optim's functional form: building a torch.optim.Optimizer imports torch._dynamo, a second of every start,
    and state kept by parameter name is what a checkpoint wants. Matrices and embeddings decay, biases and norms do not.
    Of a sharded parameter each rank updates the rows it holds.
    """

    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(self, named_parameters, config):
        self.betas, self.updates = (config.beta1, config.beta2), 0
        # The fused kernel rounds a tensor's tail otherwise than its body, so its bits follow where a shard ends
        self.fused = not config.deterministic
        self.parameters, self.moments = dict(named_parameters), {}  # name -> parameter; name -> (exp_avg, exp_avg_sq)
        self.groups = [
            ([n for n, p in self.parameters.items() if p.dim() >= 2], config.weight_decay),
            ([n for n, p in self.parameters.items() if p.dim() < 2], 0.0),
        ]

    @torch.no_grad()
    def make_state(self):
        for name, p in self.parameters.items():
            if name not in self.moments:
                self.moments[name] = (torch.zeros_like(local(p)), torch.zeros_like(local(p)))

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor | None = None) -> None:
        """One update from the gradients over grad_scale (a 0-dim tensor, None: 1)."""
        self.make_state()
        if grad_scale is not None and self.parameters:  # beside Muon's adapters there are none
            grad_scale = grad_scale.to(local(next(iter(self.parameters.values()))).device)  # offloaded parameters live on the CPU
        for names, weight_decay in self.groups:
            names = [n for n in names if local(self.parameters[n]).numel()]  # a shard may be empty
            p, gradients = [local(self.parameters[n]) for n in names], [local(self.parameters[n].grad) for n in names]
            if not p:
                continue
            if not self.fused and grad_scale is not None:
                torch._foreach_div_(gradients, grad_scale)
            # the kernel adds one to each before it uses it
            steps = [torch.full((), float(self.updates), device=x.device if self.fused else "cpu") for x in p]
            adamw(p, gradients, [self.moments[n][0] for n in names], [self.moments[n][1] for n in names], [], steps,
                  fused=self.fused, foreach=not self.fused, grad_scale=grad_scale if self.fused else None, lr=lr, beta1=self.betas[0],
                  beta2=self.betas[1], weight_decay=weight_decay, eps=1e-8, amsgrad=False, maximize=False)
        self.updates += 1

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def reset(self) -> None:
        """As before the first update."""
        self.moments, self.updates = {}, 0

    def state(self) -> dict[str, torch.Tensor]:
        """Name -> this rank's tensor of everything but the number of updates, for checkpoints: <parameter>.exp_avg and .exp_avg_sq."""
        self.make_state()
        return {f"{n}.{kind}": t for n, pair in self.moments.items() for kind, t in zip(self.STATE, pair)}


class Muon:
    """Muon (Jordan and others, 2024, kellerjordan.github.io/posts/muon) on the blocks' matrices, AdamW on everything else.

    A matrix moves along its momentum made orthogonal, every direction by the same length. Ranks share that work: each matrix is
    orthogonalised on one of them (engine.sync.Owners). Muon's rate is muon_learning_rate times the same schedule.
    """

    MOMENTUM = 0.95

    def __init__(self, named_parameters, config):
        named = list(named_parameters)
        self.matrices = {n: p for n, p in named if n.startswith("blocks.") and p.dim() == 2}
        self.adamw = AdamW([(n, p) for n, p in named if n not in self.matrices], config)
        self.momentum, self.owners = {}, None  # name -> this rank's rows; both made at the first step
        self.weight_decay, self.rate = config.weight_decay, config.muon_learning_rate / config.learning_rate

    @property
    def updates(self):
        return self.adamw.updates

    @updates.setter
    def updates(self, value):
        self.adamw.updates = value

    @torch.no_grad()
    def make_state(self):
        for name, p in self.matrices.items():
            if name not in self.momentum:
                self.momentum[name] = torch.zeros_like(local(p))

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor | None = None) -> None:
        """One update from the gradients over grad_scale (a 0-dim tensor, None: 1). The gradients' memory is worked in."""
        self.adamw.step(lr, grad_scale)
        self.make_state()
        if not self.matrices:
            return
        self.owners = self.owners or Owners(list(self.matrices.values()))
        parameters, gradients = ([local(t) for t in ts] for ts in (self.matrices.values(), (p.grad for p in self.matrices.values())))
        if grad_scale is not None:
            torch._foreach_div_(gradients, grad_scale.to(gradients[0].device))
        momentum = [self.momentum[n] for n in self.matrices]
        torch._foreach_lerp_(momentum, gradients, 1 - self.MOMENTUM)
        torch._foreach_lerp_(gradients, momentum, self.MOMENTUM)  # Nesterov's look ahead
        updates = self.owners.work_on_whole(gradients, orthogonalize)
        lr = lr * self.rate
        torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
        for whole, p, update in zip(self.matrices.values(), parameters, updates):
            p.add_(update, alpha=-lr * max(1.0, whole.size(0) / whole.size(1)) ** 0.5)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for p in self.matrices.values():
            p.grad = None

    def reset(self) -> None:
        """As before the first update."""
        self.adamw.reset()
        self.momentum = {}

    def state(self) -> dict[str, torch.Tensor]:
        """AdamW's state, and <parameter>.momentum of each matrix."""
        self.make_state()
        return {**self.adamw.state(), **{f"{name}.momentum": t for name, t in self.momentum.items()}}


def orthogonalize(g: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to g (rows, columns), roughly: singular values end between 0.7 and 1.2.

    Five steps of the quintic Newton-Schulz iteration with Muon's coefficients, in float32: in bfloat16, a last-bit difference of the
    gradient would be 1e-4 of the loss 20 updates later, and it is no faster on a CPU. A step multiplies x by a polynomial of x x^T. Where
    x is long, the polynomials are worked out on x x^T alone, a small square, and x is multiplied once, by their product: half the work at
    4 to 1. A matrix at a time, since a product of a stack may round otherwise than each of its products.
    """
    g = g.float().contiguous()  # a gradient may lie transposed where an owner's copy does not, and be summed in another order
    x = g.mT if (tall := g.size(0) > g.size(1)) else g
    x = x / (g.norm() + 1e-7)
    a = mm(x, x.mT)
    if x.size(1) < 2 * x.size(0):
        for i in range(STEPS):
            x = mm(_polynomial(a if i == 0 else mm(x, x.mT)), x)
    else:
        product = b = _polynomial(a)
        for _ in range(STEPS - 1):
            a = mm(mm(b, a), b)
            b = _polynomial(a)
            product = mm(b, product)
        x = mm(product, x)
    return x.mT if tall else x


STEPS = 5


def _polynomial(a):
    """3.4445 + -4.7750 a + 2.0315 a^2 of a symmetric matrix."""
    b = mm(a, a).mul_(2.0315).add_(a, alpha=-4.7750)
    b.diagonal().add_(3.4445)
    return b


def make_optimizer(named_parameters, config) -> AdamW | Muon:
    """AdamW or Muon over the model's parameters that are trained, as the config says."""
    trained = [(n, p) for n, p in named_parameters if p.requires_grad]
    return (Muon if config.optimizer == "muon" else AdamW)(trained, config)


class LossScale:
    """Keeps float16 gradients above its smallest number: the loss is multiplied by `value`, halved when something
    overflowed, doubled after GROWTH_INTERVAL updates without. (torch's GradScaler wants a torch.optim.Optimizer.)"""

    GROWTH_INTERVAL = 2000

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.reset()

    def reset(self):
        self.value, self.good_steps = 2.0**16 if self.enabled else 1.0, 0

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps % self.GROWTH_INTERVAL == 0:
            self.value *= 2

    def state(self):
        return {"value": self.value, "good_steps": self.good_steps} if self.enabled else None

    def load(self, state):
        if self.enabled and state:
            self.value, self.good_steps = state["value"], state["good_steps"]


def learning_rate(config, step: int) -> float:
    """The rate of update `step` (from 1): a function of the step and the settings alone."""
    c, done = config, step - 1
    if done < c.warmup_iters:
        return c.learning_rate * (done + 1) / (c.warmup_iters + 1)
    if c.lr_schedule == "constant":
        return c.learning_rate
    if done >= c.lr_decay_iters:
        return c.min_lr
    start = c.lr_decay_iters * (1 - c.decay_fraction) if c.lr_schedule == "wsd" else 0
    start = max(start, c.warmup_iters)
    part = max(0.0, (done - start) / (c.lr_decay_iters - start))  # 0 to 1 through the decay
    left = 0.5 * (1 + math.cos(math.pi * part)) if c.lr_schedule == "cosine" else 1 - part
    return c.min_lr + left * (c.learning_rate - c.min_lr)
