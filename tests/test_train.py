"""train.py from end to end: what it refuses, what it leaves, and nanoGPT's users coming as they are."""

import json
import math
import os
import shutil
import struct

import numpy as np
import pytest
import torch

from conftest import ASSETS, TINY, as_args, curve, forked, records, run_script, some_text, steps, tensors, train
from engine.families import open_weights
from sample import load_model


@pytest.fixture(scope="module")
def nanogpt_data(tmp_path_factory):
    """A data folder as nanoGPT's char-level prepare.py leaves it: headerless uint16 files and a pickled table."""
    import pickle

    folder = tmp_path_factory.mktemp("nanogpt") / "data" / "chars"
    folder.mkdir(parents=True)
    text = some_text(3000)
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    ids = np.array([stoi[c] for c in text], dtype="<u2")
    ids[:2700].tofile(folder / "train.bin")
    ids[2700:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": stoi}))
    return folder


# ------------------------------------------------------------------------------------------------------- what it refuses


def shard(path, ids, magic=20240520, version=1, count=None, dtype="<u2"):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<256i", magic, version, len(ids) if count is None else count, *[0] * 253) + np.array(ids, dtype=dtype).tobytes())


@pytest.fixture
def bare(tmp_path):
    """A folder of bare llm.c shards, to be spoiled."""
    ids = [i % 50 for i in range(400)]
    shard(tmp_path / "bare" / "x_train_000001.bin", ids)
    shard(tmp_path / "bare" / "x_val_000000.bin", ids)
    return tmp_path / "bare"


def test_bare_llm_c_shards_train(bare, tmp_path):
    train(tmp_path / "run", bare, vocab_size=50, max_iters=2)
    assert steps(tmp_path / "run") == [2]


@pytest.mark.parametrize("spoil, words", [
    (lambda f: shard(f / "x_train_000001.bin", [1] * 100, count=101), ["x_train_000001.bin", "101"]),
    (lambda f: shard(f / "x_train_000001.bin", [1, 2, 50, 3] * 100), ["50", "vocab"]),
    (lambda f: shard(f / "x_train_000001.bin", [1] * 100, magic=7), ["magic"]),
    (lambda f: shard(f / "x_train_000001.bin", [1] * 16), ["train", "16 tokens", "17", "block_size=15 would work"]),
    (lambda f: shard(f / "x_val_000000.bin", [1] * 16), ["val", "16 tokens"]),
    (lambda f: (f / "x_val_000000.bin").unlink(), ["val"]),
    (lambda f: shutil.rmtree(f), ["bare"])])
def test_data_that_cannot_be_trained_on_is_one_sentence_before_anything_is_made(spoil, words, bare, tmp_path):
    spoil(bare)
    result = train(tmp_path / "run", bare, expect=2, vocab_size=50, eval_interval=5)
    assert len(result.errors) == 1 and result.err.strip() == result.errors[0] and all(w in result.errors[0] for w in words), result.err
    assert not (tmp_path / "run").exists() and "step 1" not in result.out


def test_a_window_is_enough(bare, tmp_path):
    shard(bare / "x_train_000001.bin", list(range(17)))
    shard(bare / "x_val_000000.bin", list(range(17)))
    train(tmp_path / "run", bare, vocab_size=50, max_iters=3, eval_interval=3)
    assert len(curve(tmp_path / "run")) == 3 and len(records(tmp_path / "run", "val")) == 1


@pytest.mark.parametrize("settings, words", [
    ({"n_head": 5}, ["n_embd=48", "n_head"]), ({"total_batch_size": 100}, ["96 or 128"]), ({"lerning_rate": 1}, ["learning_rate"]),
    ({"device": "cuda:99"}, ["device"]), ({"init_from": "resume"}, ["no checkpoint"]), ({"init_from": "out/nothing"}, ["out/nothing"]),
    ({"resume_step": 3}, ["no checkpoint of step 3"])])
def test_settings_that_cannot_be_meant_are_one_sentence_before_anything_is_made(settings, words, data, tmp_path):
    result = train(tmp_path / "run", data, expect=2, **settings)
    assert len(result.errors) == 1 and result.err.strip() == result.errors[0] and all(w in result.errors[0] for w in words), result.err
    assert not (tmp_path / "run").exists()


def test_a_data_set_that_is_not_prepared_names_the_command_that_makes_it(tmp_path):
    result = run_script("train.py", "tests/empty_config.py", "--dataset=shakespeare_chr", f"--out_dir={tmp_path / 'run'}")
    assert result.code == 2 and len(result.errors) == 1 and "prepare.py" in result.errors[0]


# -------------------------------------------------------------------------------------------------------- what it leaves


def test_a_run_leaves_its_curve_its_picture_and_its_settings(data, tmp_path):
    run = tmp_path / "run"
    result = train(run, data, max_iters=7, eval_interval=3, sample_tokens=30)
    assert list(curve(run)) == list(range(1, 8)) and steps(run) == [6, 7] and [r["step"] for r in records(run, "val")] == [3, 6, 7]
    first = records(run)[0]
    assert set(first) == {"kind", "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_ms"}
    assert first["tokens"] == 128 and abs(first["loss"] - math.log(257)) < 0.2
    assert all(0 < r["mfu"] < 1.5 for r in records(run)[1:])
    picture = (run / "loss.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">2I", picture[16:24]) == (800, 600)
    assert json.loads((run / "config.json").read_text())["config"]["max_iters"] == 7
    assert "--- sample" in result.out and "step 7/7" in result.out and "parameters: " in result.out and "*max_iters = 7" in result.out


def test_evaluation_is_the_mean_over_fixed_tokens_whatever_the_batch(data, tmp_path):
    a, b, c = (tmp_path / n for n in "abc")
    train(a, data, max_iters=2, eval_interval=2, eval_tokens=160, batch_size=1)
    train(b, data, max_iters=2, eval_interval=2, eval_tokens=160, batch_size=4)
    train(c, data, max_iters=2, eval_interval=2, eval_tokens=10**9, batch_size=4)
    losses = [records(r, "val")[0]["loss"] for r in (a, b, c)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != losses[2]
    model = load_model(open_weights(str(a)), torch.device("cpu"))
    from data.shards import TokenDataset
    ids = torch.from_numpy(TokenDataset(data, "val").read(0, 161))
    with torch.no_grad():
        expected = model(ids[:160].view(10, 16), ids[1:].view(10, 16), divisor=160)
    assert losses[0] == pytest.approx(expected.item(), rel=1e-6)


def test_eval_only_evaluates_and_trains_nothing(data, tmp_path):
    train(tmp_path / "run", data, max_iters=2)
    result = train(tmp_path / "run", data, max_iters=4, eval_only=True)
    assert "validation loss" in result.out and steps(tmp_path / "run") == [2] and len(curve(tmp_path / "run")) == 2


def test_zero_updates_leave_the_checkpoint_of_step_zero(data, tmp_path):
    train(tmp_path / "run", data, max_iters=0)
    assert steps(tmp_path / "run") == [0]
    train(tmp_path / "run", data, max_iters=1, lr_decay_iters=1)
    assert steps(tmp_path / "run") == [0, 1]


@pytest.mark.parametrize("dtype, updates", [("bfloat16", 12), ("float16", 4)])  # float16 is slow on a CPU
def test_lower_precision_trains_near_the_float32_curve_and_resumes_to_the_bit(dtype, updates, data, tmp_path):
    whole, parts, full = (tmp_path / n for n in ("whole", "parts", "full"))
    settings = dict(lr_decay_iters=updates, total_batch_size=64)
    train(whole, data, dtype=dtype, max_iters=updates, **settings)
    train(parts, data, dtype=dtype, max_iters=updates // 2, **settings)
    train(parts, data, dtype=dtype, max_iters=updates, **settings)
    train(full, data, max_iters=updates, **settings)
    assert curve(whole) == curve(parts) and tensors(whole, updates) == tensors(parts, updates)
    difference = [abs(a[0] - b[0]) for a, b in zip(curve(whole).values(), curve(full).values())]
    assert 0 < max(difference) < 0.05


def test_an_update_that_is_not_finite_is_skipped_logged_and_in_the_end_stops_the_run(data, tmp_path):
    run = tmp_path / "run"
    result = train(run, data, expect=1, max_iters=60, learning_rate=1e30, warmup_iters=0, save_interval=1, keep_last=-1, max_bad_steps=2)
    bad = [r for r in records(run, "event") if r["event"] == "bad_step"]
    assert len(bad) == 4 and "again after going back to update" in result.out and bad[0]["samples"][1] == 8  # twice two in a row
    for step in steps(run)[:1]:
        model = load_model(open_weights(str(run / "checkpoints" / f"step_{step:08d}")), torch.device("cpu"))
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_compile_without_a_compiler_is_one_warning_and_the_same_curve(data, tmp_path):
    """A machine without a C++ compiler: one warning, eager."""
    env = {"PATH": str(tmp_path), "CXX": "no-such-compiler"}
    plain, asked = tmp_path / "plain", tmp_path / "asked"
    train(plain, data, max_iters=3)
    result = train(asked, data, max_iters=3, compile=True, env=env)
    assert (result.out + result.err).count("warning: compile=True needs a C++ compiler") == 1 and curve(plain) == curve(asked)


def test_compiled_checkpoints_have_plain_names_and_load_without_compile(data, tmp_path):
    if not shutil.which("g++"):
        pytest.skip("needs a C++ compiler")
    run, plain = tmp_path / "run", tmp_path / "plain"
    train(run, data, max_iters=3, compile=True, lr_decay_iters=6)
    train(run, data, max_iters=6, lr_decay_iters=6)
    train(plain, data, max_iters=6)
    for step, (loss, _, _) in curve(plain).items():
        assert loss == pytest.approx(curve(run)[step][0], rel=1e-4)


# ----------------------------------------------------------------------------------------- nanoGPT's users come as they are


def test_a_nanogpt_config_trains_on_nanogpts_files(nanogpt_data, tmp_path):
    config = tmp_path / "train_chars.py"
    config.write_text(f"""
# a config as nanoGPT's users have it
out_dir = {str(tmp_path / 'out')!r}
eval_interval = 4
eval_iters = 2
log_interval = 2
always_save_checkpoint = False
wandb_log = False
wandb_project = 'chars'
wandb_run_name = 'mini-gpt'
dataset = {str(nanogpt_data)!r}
gradient_accumulation_steps = 1
batch_size = 4
block_size = 16
n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.2
learning_rate = 1e-3
max_iters = 8
lr_decay_iters = 8
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 2
device = 'cpu'
compile = False
""")
    result = run_script("train.py", config)
    assert result.code == 0, result.err
    run = tmp_path / "out"
    assert list(curve(run)) == list(range(1, 9)) and steps(run) == [8], "max_iters=8 makes 8 updates; only the newest is kept"
    assert [lr for _, _, lr in curve(run).values()][0] == pytest.approx(1e-3 / 3)
    assert records(run)[0]["tokens"] == 64
    assert abs(curve(run)[1][0] - math.log(len(set(some_text(3000))))) < 0.2, "the vocabulary is that of its meta.pkl"
    out = run_script("sample.py", f"--out_dir={run}", "--max_new_tokens=20", "--start=def ")
    assert out.code == 0 and out.out.startswith("def "), out.err


def nanogpt_checkpoint(path, prefix, dataset=None, bias=True, vocab=65):
    """ckpt.pt as nanoGPT writes it, with the weights of a random transformers GPT-2 that has its activation; returns that model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=24, n_embd=32, n_layer=2, n_head=4, activation_function="gelu",
                                           resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if not name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.2)
            elif bias:
                p.normal_()
    state = {}
    for name, t in reference.state_dict().items():
        if bias or not name.endswith("bias"):
            flip = name.endswith("weight") and ".h." in name and "ln_" not in name
            state[prefix + name] = t.t().contiguous() if flip else t
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, bias=bias, vocab_size=vocab, dropout=0.0)
    torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}, "model_args": args, "iter_num": 5,
                "best_val_loss": torch.tensor(1.0), "config": {"dataset": dataset}}, path)
    return reference


@pytest.mark.parametrize("prefix, bias", [("", True), ("_orig_mod.", False)])
def test_a_nanogpt_checkpoint_is_the_model_it_was(prefix, bias, tmp_path):
    reference = nanogpt_checkpoint(tmp_path / "ckpt.pt", prefix, bias=bias)
    model = load_model(open_weights(str(tmp_path / "ckpt.pt")), torch.device("cpu"))
    x = torch.randint(0, 65, (2, 24))
    with torch.no_grad():
        assert torch.allclose(model(x), reference(x).logits, atol=1e-4)


def test_a_nanogpt_checkpoint_samples_with_its_characters_and_is_trained_on(nanogpt_data, tmp_path):
    root = nanogpt_data.parent.parent
    (root / "out").mkdir(exist_ok=True)
    vocab = len(set(some_text(3000)))
    nanogpt_checkpoint(root / "out" / "ckpt.pt", "_orig_mod.", dataset="chars", vocab=vocab)
    for where in (f"--init_from={root / 'out' / 'ckpt.pt'}", f"--out_dir={root / 'out'}"):
        out = forked(1, "sample.py", where, "--max_new_tokens=40", "--start=def", "--device=cpu")
        assert out.code == 0 and len(out.out) == len("def") + 40 + 1 and set(out.out) <= set(some_text(3000)), out.err
    run = tmp_path / "run"
    settings = {k: v for k, v in TINY.items() if not k.startswith(("n_", "block"))}
    result = forked(1, "train.py", "tests/empty_config.py", f"--init_from={root / 'out' / 'ckpt.pt'}", f"--out_dir={run}", f"--dataset={nanogpt_data}",
                        *as_args({**settings, "block_size": 16, "max_iters": 30}))
    assert result.code == 0, result.err
    losses = [loss for loss, _, _ in curve(run).values()]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.full
def test_tiny_shakespeare_learns_what_nanogpt_learns(tmp_path):
    """nanoGPT's README: its CPU settings end at a validation loss of 1.88 after 2,000 iterations."""
    if not os.path.isdir(ASSETS):
        pytest.skip("tinyshakespeare.txt is not here")
    result = run_script("prepare.py", os.path.join(ASSETS, "tinyshakespeare.txt"), "--tokenizer=char", "--val_fraction=0.1", f"--out={tmp_path / 'data'}")
    assert result.code == 0, result.err
    result = run_script("train.py", "configs/shakespeare_char.py", f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", "--device=cpu",
                        "--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--batch_size=12", "--dropout=0.0", "--gradient_accumulation_steps=1",
                        "--max_iters=2000", "--lr_decay_iters=2000", "--eval_interval=1000", "--eval_iters=140", timeout=900)
    assert result.code == 0, result.err
    assert records(tmp_path / "run", "val")[-1]["loss"] < 1.92
