"""A config file that makes a run count what its ranks hold and send: out_dir/counted_<rank>.json, of the last update.

Bytes of the live tensors when the optimizer steps, and what a ring sends for each collective of the forward, the backward and the step.
"""

import json as _json
import os as _os

import torch as _torch
import torch.distributed as _dist
import torch.distributed._functional_collectives as _functional

from engine import optim as _optim
from engine import sync as _sync

_COLLECTIVES = {"all_gather_single": 1, "all_gather_into_tensor": 1, "reduce_scatter_single": 1, "reduce_scatter_tensor": 1,
                "all_to_all_single": 1, "all_reduce": 2}  # times a buffer goes round the ring


def _bytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def _uncounted(function):
    """What `function` sends does not count: losses and norms, and what one collective calls another for."""
    def wrapped(*args, **kwargs):
        _run["inside"] += 1
        try:
            return function(*args, **kwargs)
        finally:
            _run["inside"] -= 1
    return wrapped


def _counted(name, function, times):
    function = _uncounted(function)

    def wrapped(*args, **kwargs):
        if not _run["inside"]:
            ranks = _dist.get_world_size(kwargs.get("group"))
            whole = max(_bytes([t]) for t in (*args, *kwargs.values()) if isinstance(t, _torch.Tensor))
            _run["sent"][name] = _run["sent"].get(name, 0) + times * (ranks - 1) / ranks * whole
        return function(*args, **kwargs)
    return wrapped


def _watch():
    init, optimizers = _sync.Sync.__init__, (_optim.AdamW, _optim.Muon)
    steps = {kind: kind.step for kind in optimizers}

    def watched_init(self, plain, place, config):
        init(self, plain, place, config)
        _run.update(parameters=list(plain.parameters()), sent={}, optimizer=optimizers[config.optimizer == "muon"],
                    path=_os.path.join(config.out_dir, f"counted_{place.rank}.json"))

    def watched_step(self, *args, **kwargs):
        held = {"weights": _bytes(map(_sync.local, _run["parameters"])), "gradients": _bytes(_sync.local(p.grad) for p in _run["parameters"] if p.grad is not None)}
        steps[type(self)](self, *args, **kwargs)
        if type(self) is _run["optimizer"]:  # Muon has an AdamW inside
            with open(_run["path"], "w") as f:
                _json.dump({**held, "optimizer": _bytes(self.state().values()), "sent": _run["sent"]}, f)
            _run["sent"] = {}

    _sync.Sync.__init__ = watched_init
    for name in ("sum_losses", "gradient_norm"):
        setattr(_sync.Sync, name, _uncounted(getattr(_sync.Sync, name)))
    for kind in optimizers:
        kind.step = watched_step
    for name, times in _COLLECTIVES.items():
        setattr(_dist, name, _counted(name, getattr(_dist, name), times))
    for name, times in {"all_gather_single": 1, "reduce_scatter_single": 1, "all_reduce": 2}.items():
        setattr(_functional, name, _counted_of_dtensor(name, getattr(_functional, name), times))


def _counted_of_dtensor(name, function, times):
    """DTensor's own collectives: the group is a mesh and one of its dimensions."""
    function = _uncounted(function)

    def wrapped(t, *args, **kwargs):
        if not _run["inside"]:
            mesh, dim = next(a for a in (*args, *kwargs.values()) if isinstance(a, tuple))
            ranks = mesh.size(dim)
            whole = _bytes([t]) * (ranks if name.startswith("all_gather") else 1)
            _run["sent"][name] = _run["sent"].get(name, 0) + times * (ranks - 1) / ranks * whole
        return function(t, *args, **kwargs)
    return wrapped


if not hasattr(_dist, "_counting"):  # several runs in one process
    _run = _dist._counting = {"inside": 0, "sent": {}}  # type: ignore[attr-defined]
    _watch()
