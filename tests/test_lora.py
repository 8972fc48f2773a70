"""Low-rank adapters: the weights stay, a few numbers beside them are trained under every layout, and nobody downstream can tell."""

import numpy as np
import pytest
import torch

import zoo
from conftest import curve, made_up_records, records, several, tensors, train, write_records
from data.order import IGNORE
from engine import lora
from engine.checkpoint import fill, open_checkpoint
from engine.config import Config, load_config, make_model_config
from engine.errors import UserError
from engine.export import export
from engine.families import open_weights
from engine.optim import make_optimizer
from engine.processes import Place
from engine.resume import compare_with_saved
from model import GPT, generate
from sample import load_model
from test_distributed import assert_close
from test_export import load, quiet
from test_families import CPU, tokens

QWEN3 = dict(n_layer=3, n_head=4, lora_rank=5)  # a rank whose rows do not divide by the shards
PLAIN = dict(**QWEN3, max_iters=8, learning_rate=1e-2, total_batch_size=8 * 32, save_interval=4, keep_last=-1, dropout=0.1)
FIXED = dict(**QWEN3, max_iters=5, learning_rate=1e-2, total_batch_size=8 * 32, deterministic=True, lr_decay_iters=5, dropout=0.1, grad_clip=0.5)
VARIANTS = {
    "plain": PLAIN, "recompute": {**PLAIN, "activation_checkpointing": "block"}, "fixed": FIXED,
    "fixed-few": {**FIXED, "lora_targets": "v, down", "optimizer": "muon", "lora_alpha": 3, "lora_rank": 2}, "fixed-bfloat16": {**FIXED, "dtype": "bfloat16"},
}
LAYOUTS = {  # name: (processes, settings, variants)
    "single": (1, {}, ["plain", "fixed", "fixed-few", "fixed-bfloat16"]),
    "ddp2": (2, dict(parallel="ddp"), ["plain", "fixed"]), "offload2": (2, dict(parallel="fsdp", cpu_offload=True, activation_checkpointing="selective"), ["plain"]),
    "fsdp2": (2, dict(parallel="fsdp"), ["recompute", "fixed", "fixed-few", "fixed-bfloat16"]),
    "ddp4": (4, dict(parallel="ddp"), ["fixed"]), "fsdp4": (4, dict(parallel="fsdp"), ["plain", "fixed", "fixed-few"]),
    "hsdp2x2": (4, dict(parallel="fsdp", dp_replicate=2), ["plain", "fixed"]),
}
MANY = [(layout, variant) for layout, (n, _, variants) in LAYOUTS.items() if n > 1 for variant in variants]


def adapters(names):
    return {n for n in names if n.endswith((".lora_a", ".lora_b"))}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random Qwen3 of transformers, as a folder."""
    folder = str(tmp_path_factory.mktemp("base") / "qwen3")
    zoo.make("qwen3_untied").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(data, base, tmp_path_factory):
    """<layout>-<variant> of all LAYOUTS; what goes on, branches and is left alone besides; `said`, what the branches said."""
    folder, few = tmp_path_factory.mktemp("lora"), {**PLAIN, "lora_rank": 0, "max_iters": 2}
    more = {1: {"full": few, "zero": {**few, "lora_rank": 0, "lora_alpha": 3, "lora_targets": "q"},
                "parts": {**FIXED, "max_iters": 2}},
            2: {"parts": {**FIXED, "max_iters": 3, "parallel": "fsdp"}}, 4: {"parts": {**FIXED, "max_iters": 4, "parallel": "fsdp", "dp_replicate": 2}}}
    for n in (1, 2, 4):
        mine = {f"{layout}-{variant}": {**VARIANTS[variant], **settings} for layout, (size, settings, variants) in LAYOUTS.items() if size == n
                for variant in variants}
        several(n, [(folder / name, data, {**settings, "init_from": base}) for name, settings in {**mine, **more[n]}.items()])
    export(open_weights(str(folder / "single-plain")), None, folder / "hf", quiet)
    branch = {**PLAIN, "lora_rank": 0, "max_iters": 1, "seed": 5}
    result = several(1, [(folder / "parts", data, {**FIXED, "init_from": base}), (folder / "plain", data, {**branch, "init_from": folder / "single-plain"}),
                         (folder / "again", data, {**branch, "init_from": folder / "single-plain", "lora_rank": 3}),
                         (folder / "exported", data, {**branch, "init_from": folder / "hf"}),
                         (folder / "on-full", data, {**branch, "init_from": folder / "full", "lora_rank": 3})])
    (folder / "said").write_text(result.out)
    return folder


# ---------------------------------------------------------------------------------------------------------------- one curve


@pytest.mark.parametrize("layout, variant", [(a, b) for a, b in MANY if not b.startswith("fixed")])
def test_every_layout_draws_the_curve_of_one_process(layout, variant, runs):
    assert_close(curve(runs / f"{layout}-{variant}"), curve(runs / "single-plain"))


@pytest.mark.parametrize("layout, variant", [(a, b) for a, b in MANY if b.startswith("fixed")])
def test_deterministic_is_the_same_bits_on_any_number_of_processes(layout, variant, runs):
    assert curve(runs / f"{layout}-{variant}") == curve(runs / f"single-{variant}")
    assert tensors(runs / f"{layout}-{variant}", 5) == tensors(runs / f"single-{variant}", 5)


def test_a_run_goes_on_under_other_layouts_to_the_same_bits(runs):
    assert [r["step"] for r in records(runs / "parts", "event") if r["event"] == "resumed"] == [2, 3, 4]
    assert curve(runs / "parts") == curve(runs / "single-fixed") and tensors(runs / "parts", 5) == tensors(runs / "single-fixed", 5)


def test_a_checkpoint_written_while_the_run_goes_on_is_that_of_its_step(runs, data, base, tmp_path):
    (tmp_path / "slow.py").write_text("""
import time as _time
import engine.checkpoint as _checkpoint
_write = _checkpoint.SyncedFile.write
_checkpoint.SyncedFile.write = lambda *data: _time.sleep(0.01) or _write(*data)
""")
    train(tmp_path / "run", data, config=str(tmp_path / "slow.py"), **{**PLAIN, "init_from": base, "async_save": True, "max_iters": 6, "lr_decay_iters": 8})
    assert tensors(tmp_path / "run", 4) == tensors(runs / "single-plain", 4)


def test_the_first_step_is_the_base_models_and_the_loss_falls(runs):
    single, full = curve(runs / "single-plain"), curve(runs / "full")
    assert single[1][0] == full[1][0] and single[1][1] != full[1][1], "B is zero: the same bits, another gradient"
    assert single[8][0] < single[1][0] - 0.2


def test_rank_0_is_a_run_without_the_setting(runs):
    assert curve(runs / "full") == curve(runs / "zero") and tensors(runs / "full", 2) == tensors(runs / "zero", 2)
    full, zero = (open_checkpoint(str(runs / run / "checkpoints" / "step_00000002")).manifest["config"] for run in ("full", "zero"))
    assert {**full, "out_dir": None} == {**zero, "out_dir": None}, "so either goes on from the other"


@pytest.mark.full
def test_adapters_of_sft_are_one_curve_too(base, tmp_path):
    found = made_up_records(np.random.default_rng(2).integers(4, 33, 220))
    chats = write_records(tmp_path / "chats", train=found[:200], val=found[200:])
    settings = {**FIXED, "init_from": base, "task": "sft", "block_size": 32, "max_iters": 6, "lr_decay_iters": 6, "eval_interval": 3, "eval_tokens": 4 * 32}
    several(1, [(tmp_path / "one", chats, settings)])
    several(2, [(tmp_path / f"{layout}2", chats, {**settings, "parallel": layout, "max_iters": end}) for layout in ("ddp", "fsdp") for end in (2, 6)])
    several(4, [(tmp_path / "fsdp4", chats, {**settings, "parallel": "fsdp"})])
    for run in ("ddp2", "fsdp2", "fsdp4"):
        assert curve(tmp_path / run) == curve(tmp_path / "one") and tensors(tmp_path / run, 6) == tensors(tmp_path / "one", 6), run


# ------------------------------------------------------------------------------------------------ only the adapters are trained


@pytest.mark.parametrize("variant, targets", [("plain", "q k v o gate up down"), ("fixed-few", "v down")])
def test_a_checkpoint_has_moments_of_adapters_alone_and_the_weights_as_they_were(variant, targets, runs, base):
    checkpoint = open_checkpoint(str(runs / f"single-{variant}" / "checkpoints" / f"step_{VARIANTS[variant]['max_iters']:08d}"))
    found = adapters(checkpoint.names("model"))
    assert found == {f"blocks.{i}.{'attn' if t in 'qkvo' else 'mlp'}.{t}.lora_{x}" for i in range(3) for t in targets.split() for x in "ab"}
    kinds = ("momentum",) if variant == "fixed-few" else ("exp_avg", "exp_avg_sq")
    assert set(checkpoint.names("optimizer")) == {f"{n}.{kind}" for n in found for kind in kinds}
    before = open_weights(base).sources
    for name in set(checkpoint.names("model")) - found:
        shape, read = before[name]
        rows = slice(0, shape[0])  # a file has no padding of the vocabulary
        assert torch.equal(checkpoint.read("model", name, rows), read(rows)), name
    assert all(checkpoint.read("model", name).abs().max() > 0 for name in found)


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
def test_frozen_parameters_take_no_memory_beside_themselves(tied):
    config, model = adapted(tie_embeddings=tied, lora_rank=2)
    optimizer = make_optimizer(model.named_parameters(), config)
    x, saved = tokens(2, 16, 97), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = model(x, x)
    head = (model.wte if tied else model.head).weight
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not any(t.shape == head.shape and t.untyped_storage().data_ptr() not in own for t in saved if t is not None), "no gradient of the head is made"
    loss.backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == adapters(dict(model.named_parameters())) and len(with_gradient) == 2 * 2 * 6
    trained = sum(p.numel() * 4 for n, p in model.named_parameters() if n in with_gradient)
    assert sum(t.numel() * 4 for t in optimizer.state().values()) == 2 * trained  # and 1 for the gradients
    assert trained < sum(p.numel() * 4 for p in model.parameters()) / 8


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
def test_a_micro_batch_without_a_label_has_gradients_of_zero(tied):
    _, model = adapted(tie_embeddings=tied, lora_rank=2)
    x = tokens(2, 16, 97)
    model(x, torch.full_like(x, IGNORE), divisor=5).backward()
    assert all((p.grad == 0).all() if n in adapters([n]) else p.grad is None for n, p in model.named_parameters())


def adapted(**settings):
    """(Config, GPT with adapters of values that show)"""
    c = Config(**{**dict(block_size=16, vocab_size=97, n_layer=2, n_head=2, n_embd=32, bias=True), **settings})
    model = GPT(make_model_config(c))
    lora.add_adapters(model, c)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    return c, model


# ----------------------------------------------------------------------------------------------------------- merged on the way out


def with_adapters(run, step):
    """The model of a checkpoint as it was trained: adapters beside the weights."""
    checkpoint = open_checkpoint(str(run / "checkpoints" / f"step_{step:08d}"))
    config = Config(**checkpoint.manifest["config"])
    model = GPT(checkpoint.model_config())
    lora.add_adapters(model, config)
    parameters = dict(model.named_parameters())
    fill(Place(device=CPU), parameters, parameters, checkpoint.sources("model"), run)
    return model.eval()


@pytest.mark.parametrize("run, step", [("single-plain", 8), ("fsdp4-fixed-few", 5)])
def test_what_reads_a_run_gets_merged_weights(run, step, runs, base, tmp_path):
    trained, merged, x = with_adapters(runs / run, step), load_model(open_weights(str(runs / run)), CPU), tokens(2, 16)
    before = load_model(open_weights(base), CPU)
    assert not adapters(dict(merged.named_parameters()))
    export(open_weights(str(runs / run)), None, tmp_path / "hf", quiet)
    with torch.no_grad():
        logits = trained(x)
        assert (logits - before(x)).abs().max() > 0.05, "what was trained shows"
        assert (logits - merged(x)).abs().max() < 1e-5
        assert (logits - load(tmp_path / "hf")(x).logits).abs().max() < 1e-5
    texts = [torch.stack(list(generate(m, x[:, :4], 12, temperature=0)), 1) for m in (trained, merged)]
    assert torch.equal(*texts)  # with the weights in oneDNN's layout and the adapters beside them


@pytest.mark.quick
def test_merged_rows_are_the_same_bits_whichever_are_asked_for():
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(*s, generator=generator) for s in ((1000, 300), (7, 300), (1000, 7)))
    sources = {"x.weight": (w.shape, lambda r: w[r]), "x.lora_a": (a.shape, lambda r: a[r]), "x.lora_b": (b.shape, lambda r: b[r])}
    before = w.clone()
    shape, read = lora.merged(sources, {"lora_rank": 7, "lora_alpha": 3.5}, "here")["x.weight"]
    whole = read(slice(None))
    assert shape == w.shape and (whole - (w + 0.5 * (b.double() @ a.double()))).abs().max() < 1e-5 and torch.equal(w, before)
    for each in (1000, 500, 334, 255, 257, 7):
        assert torch.equal(torch.cat([read(slice(at, min(1000, at + each))) for at in range(0, 1000, each)]), whole), each
    assert read(slice(5, 5)).shape == (0, 300) and torch.equal(read(slice(256, 512)), whole[256:512])


@pytest.mark.quick
@pytest.mark.parametrize("shapes, settings", [
    (((8, 4), (2, 4), (8, 2)), {}), (((8, 4), (2, 4), (8, 2)), {"lora_rank": 3, "lora_alpha": 1}), (((8, 4), (2, 4), (8, 2)), {"lora_rank": 2, "lora_alpha": "1"}),
    (((8, 4), (2, 4), (8, 2)), {"lora_rank": 2, "lora_alpha": float("nan")}), (((8, 4), (2, 8), (8, 2)), {"lora_rank": 2, "lora_alpha": 1}),
    (((8, 4), (2, 4), None), {"lora_rank": 2, "lora_alpha": 1}), ((None, (2, 4), (8, 2)), {"lora_rank": 2, "lora_alpha": 1}),
    (((8,), (2, 4), (8, 2)), {"lora_rank": 2, "lora_alpha": 1}), (((8, 4), (0, 4), (8, 0)), {"lora_rank": 0, "lora_alpha": 1})])
def test_adapters_that_do_not_fit_are_named(shapes, settings):
    names = ("x.weight", "x.lora_a", "x.lora_b")
    with pytest.raises(UserError) as caught:
        lora.merged({n: (list(s), None) for n, s in zip(names, shapes) if s}, settings, "here")
    assert "here is damaged: the adapter of x " in str(caught.value)


def test_branches_begin_with_the_merged_model_and_a_new_optimizer(runs):
    assert (runs / "said").read_text().count("the optimizer starts anew") == 3  # of weights from elsewhere there is none
    loss = {name: curve(runs / name)[1][0] for name in ("plain", "again", "exported", "on-full")}
    assert loss["plain"] == loss["again"] == loss["exported"] != loss["on-full"]
    assert tensors(runs / "plain", 1) == tensors(runs / "exported", 1), "the moments too"
    assert not adapters(open_checkpoint(str(runs / "plain" / "checkpoints" / "step_00000001")).names("model"))


# ---------------------------------------------------------------------------------------------------------------- bad input


def refused(*argv):
    with pytest.raises(UserError) as caught:
        make_model_config(load_config(["--n_embd=48", "--n_head=3", "--vocab_size=97", *argv], "tests/empty_config.py"))
    assert len(caught.value.sentences) == 1
    return str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize("argv, words", [
    (["--lora_rank=-1"], ["lora_rank=-1", "at least 0"]), (["--lora_rank=49"], ["lora_rank=49", "48 x 48", "48 at most"]),
    (["--lora_rank=17", "--n_kv_head=1"], ["the matrix k, 16 x 48", "16 at most"]), (["--lora_rank=4", "--lora_alpha=0"], ["lora_alpha=0.0", "above 0"]),
    (["--lora_rank=4", "--lora_targets=q,w"], ["'w'", "q,k,v,o,up,down"]), (["--lora_rank=4", "--lora_targets=gate"], ["'gate'"]),
    (["--lora_rank=4", "--lora_targets="], ["''", "all"]), (["--lora_rank=4", "--resize_vocab"], ["resize_vocab"])])
def test_settings_that_cannot_be_are_refused_in_a_sentence(argv, words):
    text = refused("--init_from=a", *argv)
    assert all(w in text for w in words), text


@pytest.mark.quick
def test_adapters_need_something_to_adapt():
    assert "expected init_from=" in refused("--lora_rank=4")
    c = load_config(["--lora_rank=4", "--init_from=scratch", "--n_embd=48", "--n_head=3", "--vocab_size=97", "--mlp=swiglu"], "tests/empty_config.py")
    make_model_config(c)
    assert (c.lora_alpha, c.lora_targets) == (8.0, "q,k,v,o,up,gate,down")


def test_a_run_keeps_its_adapters(runs, data, base):
    result = train(runs / "single-plain", data, expect=2, **{**PLAIN, "init_from": base, "max_iters": 9, "lora_rank": 4})
    assert len(result.errors) == 1 and "lora_rank is 5" in result.errors[0] and "4 in this configuration" in result.errors[0]
    result = train(runs / "full", data, expect=2, **{**PLAIN, "init_from": base, "max_iters": 3})
    assert len(result.errors) == 1 and "lora_rank is 0" in result.errors[0]
    saved = open_checkpoint(str(runs / "single-plain" / "checkpoints" / "step_00000008")).manifest["config"]
    for change, words in ((dict(lora_rank=0, lora_alpha=None, lora_targets="all"), "lora_rank is 5"), (dict(lora_alpha=1.0), "lora_alpha is 10.0"),
                          (dict(lora_targets="q"), "lora_targets is q,k,v,o,up,gate,down")):
        with pytest.raises(UserError) as caught:
            compare_with_saved(Config(**{**saved, **change, "allow_change": True}), saved, "there")
        assert len(caught.value.sentences) == 1 and words in str(caught.value)
