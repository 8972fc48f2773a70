"""AdamW is AdamW, schedules are what their names say, clipping clips, and small gradients survive float16."""

import math
from types import SimpleNamespace

import pytest
import torch

from engine.config import Config
from engine.optim import AdamW, LossScale, Muon, learning_rate, orthogonalize
from engine.sync import deal

pytestmark = pytest.mark.quick


def settings(**given):
    c = Config(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110, decay_fraction=0.2)
    for key, value in given.items():
        setattr(c, key, value)
    return c


@pytest.mark.parametrize("deterministic", [False, True])
def test_twenty_clipped_steps_equal_torchs_own_optimizer(deterministic):
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in (torch.ones(5, 7), torch.ones(7))] for _ in range(2))
    mine = AdamW([("w", ours[0]), ("b", ours[1])], settings(weight_decay=0.1, beta1=0.9, beta2=0.95, deterministic=deterministic))
    reference = torch.optim.AdamW([{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}],
                                  betas=(0.9, 0.95))
    for i in range(20):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a) * 3
            b.grad = a.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        for group in reference.param_groups:
            group["lr"] = 0.01 * (i + 1)
        reference.step()
        mine.step(0.01 * (i + 1), norm.clamp(min=1.0))
        mine.zero_grad()
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, atol=1e-5) and a.grad is None
    assert mine.updates == 20 and set(mine.state()) == {"w.exp_avg", "w.exp_avg_sq", "b.exp_avg", "b.exp_avg_sq"}


def test_warmup_is_nanogpts():
    assert [round(learning_rate(settings(), step) * 11) for step in (1, 2, 10)] == [1, 2, 10]


def test_cosine_is_nanogpts():
    def nanogpt(it):  # from 0, as there
        ratio = (it - 10) / (110 - 10)
        return 0.1 + 0.5 * (1 + math.cos(math.pi * ratio)) * 0.9
    for step in (11, 12, 50, 60, 110):
        assert learning_rate(settings(lr_schedule="cosine"), step) == pytest.approx(nanogpt(step - 1), abs=1e-12)
    assert learning_rate(settings(lr_schedule="cosine"), 112) == 0.1


def test_wsd_holds_then_falls_in_its_last_fifth():
    rate = lambda step: learning_rate(settings(lr_schedule="wsd"), step)
    assert rate(11) == rate(50) == rate(89) == 1.0
    assert rate(100) == pytest.approx(0.1 + 0.9 * (110 - 99) / 22) and rate(111) == rate(10_000) == pytest.approx(0.1)


def test_linear_and_constant():
    assert learning_rate(settings(lr_schedule="linear"), 61) == pytest.approx(0.55)
    assert learning_rate(settings(lr_schedule="constant"), 10_000) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_a_schedule_that_is_all_warmup_or_a_single_step_is_finite(schedule):
    for given in (dict(warmup_iters=110), dict(warmup_iters=0, lr_decay_iters=1), dict(warmup_iters=500)):
        for step in (1, 2, 110, 111, 600):
            assert 0 < learning_rate(settings(lr_schedule=schedule, **given), step) <= 1.0


def test_a_longer_max_iters_alone_changes_no_earlier_step():
    for schedule in ("cosine", "wsd", "linear", "constant"):
        a, b = settings(lr_schedule=schedule, max_iters=50), settings(lr_schedule=schedule, max_iters=500)
        assert [learning_rate(a, s) for s in range(1, 200)] == [learning_rate(b, s) for s in range(1, 200)]


def test_the_loss_scale_halves_on_overflow_and_grows_back():
    scale = LossScale(True)
    scale.update(False)
    assert scale.value == 2.0**15
    for _ in range(LossScale.GROWTH_INTERVAL):
        scale.update(True)
    assert scale.value == 2.0**16
    other = LossScale(True)
    other.load(scale.state())
    assert vars(other) == vars(scale)
    off = LossScale(False)
    off.update(False)
    assert off.value == 1.0 and off.state() is None


def test_only_matrices_decay():
    p = {n: torch.nn.Parameter(torch.ones(s)) for n, s in (("w", (2, 2)), ("norm", (2,)))}
    optimizer = AdamW(p.items(), SimpleNamespace(beta1=0.9, beta2=0.95, weight_decay=0.5, deterministic=False))
    for t in p.values():
        t.grad = torch.zeros_like(t)
    optimizer.step(0.1)
    assert torch.allclose(p["w"], torch.tensor(0.95)) and (p["norm"] == 1).all()


def test_a_muon_step_is_orthogonal_and_equals_torchs_own():
    torch.manual_seed(0)
    shapes = {"blocks.0.a": (8, 8), "blocks.0.b": (24, 8), "blocks.1.b": (24, 8), "blocks.0.c": (8, 24)}
    ours = {n: torch.nn.Parameter(torch.randn(s)) for n, s in shapes.items()}
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours.values()]
    other = {"wte.weight": torch.nn.Parameter(torch.randn(5, 3)), "norm.weight": torch.nn.Parameter(torch.ones(3))}
    c = settings(learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.1, beta1=0.9, beta2=0.95)
    mine = Muon([*ours.items(), *other.items()], c)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="original")
    for _ in range(3):
        for a, b in zip(ours.values(), theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for p in other.values():
            p.grad = torch.ones_like(p)
        mine.step(0.01)
        reference.step()
    for a, b in zip(ours.values(), theirs):
        assert (a - b).abs().max() < 0.02 * 3 * 0.05, "within torch's bfloat16"
    assert set(mine.state()) == {f"{n}.momentum" for n in ours} | {f"{n}.{k}" for n in other for k in ("exp_avg", "exp_avg_sq")}
    mine.zero_grad()
    assert all(p.grad is None for p in [*ours.values(), *other.values()])


@pytest.mark.parametrize("shape", [(48, 48), (48, 16), (16, 48), (200, 130), (131, 45), (128, 512), (3, 200)])
def test_an_orthogonalized_matrix_has_the_singular_values_of_the_quintic_iteration(shape):
    """Against the iteration written out in float64, also where singular values span five orders of magnitude."""
    torch.manual_seed(0)
    g = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalize(g))
    assert values.min() > 0.5 and values.max() < 1.3
    u, s, v = torch.linalg.svd(g.double(), full_matrices=False)
    for spread in (s, torch.logspace(0, -5, len(s), dtype=torch.float64)):
        x = spread / spread.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
        got = orthogonalize((u @ torch.diag(spread) @ v).float()).double()
        assert (got - u @ torch.diag(x) @ v).abs().max() < 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_matrices_are_dealt_so_that_ranks_have_alike_to_do(ranks):
    shapes = [(768, 768)] * 48 + [(3072, 768)] * 12 + [(768, 3072)] * 12
    dealt, length = deal(shapes, ranks, 1)
    assert sorted(i for owned in dealt for i in owned) == list(range(72))
    work = [sum(min(shapes[i]) ** 2 * max(shapes[i]) for i in owned) for owned in dealt]
    assert max(work) - min(work) <= 768**3 and length == max(sum(math.prod(shapes[i]) for i in owned) for owned in dealt)
    assert deal(shapes[:2], 8, 8)[1] == 96 * 768, "a shard of the one matrix that an owner has"


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(2, 48), (131, 45), (48, 2), (64, 64), (96, 200)])
def test_how_a_matrix_lies_in_memory_changes_no_bit_of_what_muon_makes_of_it(shape):
    """A gradient may be transposed where the copy that its owner under FSDP works on is not."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orthogonalize(g), orthogonalize(g.t().contiguous().t()))
