"""Parameter groups, AdamW, Muon, gradient clipping, learning-rate schedules, loss scaling for float16."""

import math

import torch
from torch.optim.adamw import adamw

from engine.sync import local, own_rows, whole_rows


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
    def step(self, lr, grad_scale=None):
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

    def zero_grad(self):
        for p in self.parameters.values():
            p.grad = None

    def reset(self):
        """As before the first update."""
        self.moments, self.updates = {}, 0

    def state(self):
        """Name -> this rank's tensor of everything but the number of updates, for checkpoints: <parameter>.exp_avg and .exp_avg_sq."""
        self.make_state()
        return {f"{n}.{kind}": t for n, pair in self.moments.items() for kind, t in zip(self.STATE, pair)}


class Muon:
    """Muon (Jordan and others, 2024, kellerjordan.github.io/posts/muon) on the blocks' matrices, AdamW on everything else.

    A matrix moves along its momentum made orthogonal, every direction by the same length. Matrices of one shape are
    stacked and go through together: on a CPU a product of sixteen small matrices costs half of sixteen products. Sharded
    matrices are gathered whole for it. Muon's rate is muon_learning_rate times the same schedule.
    """

    MOMENTUM = 0.95

    def __init__(self, named_parameters, config):
        self.matrices, rest = {}, []  # shape -> [(name, parameter)]
        for name, p in named_parameters:
            if name.startswith("blocks.") and p.dim() == 2:
                self.matrices.setdefault(tuple(p.shape), []).append((name, p))
            else:
                rest.append((name, p))
        self.adamw = AdamW(rest, config)
        self.momentum = {}  # shape -> (matrices, this rank's rows, columns), made at the first step
        self.weight_decay, self.rate = config.weight_decay, config.muon_learning_rate / config.learning_rate

    @property
    def updates(self):
        return self.adamw.updates

    @updates.setter
    def updates(self, value):
        self.adamw.updates = value

    @torch.no_grad()
    def make_state(self):
        for shape, found in self.matrices.items():
            if shape not in self.momentum:
                self.momentum[shape] = torch.stack([torch.zeros_like(local(p)) for _, p in found])

    @torch.no_grad()
    def step(self, lr, grad_scale=None):
        """One update from the gradients over grad_scale (a 0-dim tensor, None: 1)."""
        self.adamw.step(lr, grad_scale)
        self.make_state()
        lr = lr * self.rate
        for shape, found in self.matrices.items():
            gradient = torch.stack([local(p.grad) for _, p in found])  # (matrices, rows, columns)
            if grad_scale is not None:
                gradient /= grad_scale
            momentum = self.momentum[shape].lerp_(gradient, 1 - self.MOMENTUM)
            ahead = gradient.lerp_(momentum, self.MOMENTUM)  # Nesterov's look ahead
            update = own_rows(orthogonalize(whole_rows(ahead, found[0][1])), found[0][1])
            parameters = [local(p) for _, p in found]
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, list(update.unbind()), alpha=-lr * max(1.0, shape[0] / shape[1]) ** 0.5)

    def zero_grad(self):
        self.adamw.zero_grad()
        for found in self.matrices.values():
            for _, p in found:
                p.grad = None

    def reset(self):
        """As before the first update."""
        self.adamw.reset()
        self.momentum = {}

    def state(self):
        """AdamW's state, and <parameter>.momentum of each matrix."""
        self.make_state()
        own = {f"{name}.momentum": t for shape, found in self.matrices.items() for (name, _), t in zip(found, self.momentum[shape])}
        return {**self.adamw.state(), **own}


def orthogonalize(g):
    """The nearest semi-orthogonal matrices to g (N, rows, columns), roughly: singular values end between 0.7 and 1.2.

    Five steps of the quintic Newton-Schulz iteration with Muon's coefficients, in float32: in bfloat16, a last-bit
    difference of the gradient would be 1e-4 of the loss 20 updates later, and it is no faster on a CPU.
    """
    x = g.float()
    if tall := x.size(1) > x.size(2):  # the products below are squares of the first dimension
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def make_optimizer(named_parameters, config):
    """AdamW or Muon over the model's parameters that are trained, as the config says."""
    trained = [(n, p) for n, p in named_parameters if p.requires_grad]
    return {"adamw": AdamW, "muon": Muon}[config.optimizer](trained, config)


class LossScale:
    """Keeps float16 gradients above its smallest number: the loss is multiplied by `value`, halved when something
    overflowed, doubled after GROWTH_INTERVAL updates without. (torch's GradScaler wants a torch.optim.Optimizer.)"""

    GROWTH_INTERVAL = 2000

    def __init__(self, enabled):
        self.enabled = enabled
        self.reset()

    def reset(self):
        self.value, self.good_steps = 2.0**16 if self.enabled else 1.0, 0

    def update(self, finite):
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


def learning_rate(config, step):
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
