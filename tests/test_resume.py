"""A run that was stopped and resumed is the run that was not: every later loss, the weights and Adam's moments, to the bit."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, TINY, as_args, curve, forked, records, steps, tensors, train
from engine.matmul import processor
from engine.resume import other_machine

# 100 windows and 8 samples an update: epoch 0 ends within update 13
CURVE = dict(dropout=0.2, total_batch_size=128, lr_decay_iters=18)  # 128 = 4 micro-batches of 2 x 16


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_a_run_stopped_in_epoch_0_and_in_epoch_1_draws_the_undisturbed_curve(schedule, data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, data, lr_schedule=schedule, max_iters=20, **CURVE)
    train(parts, data, lr_schedule=schedule, max_iters=5, save_interval=1, keep_last=-1, **CURVE)
    train(parts, data, lr_schedule=schedule, max_iters=17, save_interval=1, keep_last=-1, **CURVE)
    train(parts, data, lr_schedule=schedule, max_iters=20, **CURVE)
    assert sorted(curve(whole)) == list(range(1, 21)) and curve(whole) == curve(parts)
    assert tensors(whole, 20) == tensors(parts, 20)
    assert [r["step"] for r in records(parts, "event") if r["event"] == "resumed"] == [5, 17]
    losses = [loss for loss, _, _ in curve(whole).values()]
    assert losses[-1] < losses[0] - 0.5, "nothing was learned: equal curves would prove little"


def test_saving_and_evaluating_at_every_step_changes_nothing(data, tmp_path):
    quiet, busy = tmp_path / "quiet", tmp_path / "busy"
    train(quiet, data, max_iters=8, **CURVE)
    train(busy, data, max_iters=8, save_interval=1, eval_interval=1, sample_interval=1, sample_tokens=3, log_interval=3, **CURVE)
    assert curve(quiet) == curve(busy) and tensors(quiet, 8) == tensors(busy, 8)
    assert len(records(busy, "val")) == 8


def test_another_micro_batch_is_the_same_curve_but_for_rounding(data, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    train(a, data, max_iters=10, batch_size=2)
    train(b, data, max_iters=10, batch_size=8)
    for step, (loss, norm, _) in curve(a).items():
        assert loss == pytest.approx(curve(b)[step][0], rel=1e-5) and norm == pytest.approx(curve(b)[step][1], rel=1e-4)


@pytest.fixture(scope="module")
def ten(data, tmp_path_factory):
    """A run of 10 updates with checkpoints at 2, 4, ... 10."""
    run = tmp_path_factory.mktemp("ten") / "run"
    train(run, data, max_iters=10, save_interval=2, keep_last=-1)
    return run


@pytest.fixture
def run(ten, tmp_path):
    return shutil.copytree(ten, tmp_path / "run")


def test_the_same_command_again_has_nothing_left_to_do(run, data):
    before = (run / "metrics.jsonl").read_text()
    result = train(run, data, max_iters=10)
    assert "nothing left to train: a larger --max_iters" in result.out and curve(run) and len((run / "metrics.jsonl").read_text()) >= len(before)
    assert sorted(curve(run)) == list(range(1, 11))


def test_architecture_cannot_change(run, data):
    for change in (dict(n_layer=3), dict(block_size=8), dict(mlp="relu2")):
        result = train(run, data, expect=2, max_iters=12, **change)
        key, value = next(iter(change.items()))
        assert len(result.errors) == 1 and key in result.errors[0] and str(value) in result.errors[0]
    assert steps(run)[-1] == 10


def test_what_changes_the_curve_stops_unless_allowed(run, data):
    result = train(run, data, expect=2, max_iters=12, learning_rate=2e-2, seed=5)
    assert len(result.errors) == 3  # min_lr follows from learning_rate
    assert any("learning_rate was 0.01" in e and "is 0.02" in e and "--allow_change" in e for e in result.errors)
    result = train(run, data, max_iters=12, learning_rate=2e-2, allow_change=True)
    assert "learning_rate was 0.01, is 0.02 from here on" in result.out and steps(run)[-1] == 12
    event = [r for r in records(run, "event") if r["event"] == "resumed"][-1]
    assert ["learning_rate", 0.01, 0.02] in event["changed"]


def test_what_does_not_change_the_curve_is_free(run, data):
    train(run, data, max_iters=11, log_interval=7, save_interval=1, keep_last=1, eval_interval=11)
    assert steps(run) == [11]


def test_a_longer_run_keeps_the_schedule_it_began_with(run, data, tmp_path):
    result = train(run, data, max_iters=12)
    assert "still reaches min_lr at update 10" in result.out
    assert "learning rate is 0" not in result.out
    assert [lr for _, _, lr in list(curve(run).values())[-2:]] == [1e-3, 1e-3]


def test_updates_that_would_learn_nothing_are_told_of_at_once(data, tmp_path):
    train(tmp_path / "run", data, max_iters=2, min_lr=0.0)
    result = train(tmp_path / "run", data, max_iters=4, min_lr=0.0)
    assert "warning: the learning rate is 0 in all 2 updates to come, nothing will be learnt: --lr_decay_iters=4 --allow_change" in result.out
    result = train(tmp_path / "run", data, max_iters=6, min_lr=0.0, lr_decay_iters=6, allow_change=True, threads=2)
    assert "the learning rate is 0" not in result.out and "last bits may differ" in result.out


def test_what_last_bits_depend_on_is_told_where_it_is_known_to_have_changed():
    def manifest(device="cpu", processor="AuthenticAMD 25 1 AVX2", torch="2.13.0", threads=2):
        return {"device": device, "threads": threads, "versions": {"torch": torch} | ({"processor": processor} if processor else {})}

    assert other_machine(manifest(), manifest()) is None
    assert other_machine(manifest(processor=None), manifest()) is None, "a manifest that names no processor says nothing of it"
    for now, named in ((manifest(processor="AuthenticAMD 26 2 AVX512"), "cpu (AuthenticAMD 26 2 AVX512), torch 2.13.0, 2 threads"),
                       (manifest(torch="2.14.0"), "cpu (AuthenticAMD 25 1 AVX2), torch 2.14.0, 2 threads"),
                       (manifest("cuda", "NVIDIA H200"), "cuda (NVIDIA H200), torch 2.13.0, 2 threads")):
        assert f"written on cpu (AuthenticAMD 25 1 AVX2), torch 2.13.0, 2 threads; this is {named}: " in other_machine(manifest(), now)
    assert "on cpu, torch 2.13.0, 1 threads; this is cpu, torch 2.13.0, 2 threads:" in other_machine(manifest(processor=None, threads=1), manifest())


def test_settings_of_another_run_are_told_before_its_data_is_looked_for(run, data, tmp_path):
    result = train(run, data, expect=2, task="sft", dataset="nowhere.json")
    assert len(result.errors) == 1 and "of a run of task=pretrain, and this is task=sft: give another --out_dir" in result.errors[0]
    result = train(run, "nowhere", expect=2, init_from=tmp_path / "none")
    assert f"init_from was scratch there and is {tmp_path / 'none'} now: its weights are the checkpoint's own" in result.out
    assert "dataset was" in result.out and "no data set 'nowhere'" in result.errors[0]

def test_other_data_stops_unless_allowed(run, data, tmp_path):
    from prepare import prepare

    (tmp_path / "other.txt").write_text("another text altogether\n" * 90)
    other = prepare(str(tmp_path / "other.txt"), tokenizer="byte", val_fraction=0.2, workers=1, out=str(tmp_path / "other"), quiet=True)
    result = train(run, other, expect=2, max_iters=12)
    assert len(result.errors) == 1 and "--allow_change" in result.errors[0]
    train(run, other, max_iters=12, allow_change=True)
    chars = prepare(str(tmp_path / "other.txt"), tokenizer="char", val_fraction=0.2, workers=1, out=str(tmp_path / "chars"), quiet=True)
    result = train(run, chars, expect=2, max_iters=14, vocab_size=257, allow_change=True)
    assert len(result.errors) == 1 and "tokenizer" in result.errors[0]


def test_going_back_sets_later_checkpoints_aside_and_draws_the_same_curve(run, ten, data):
    train(run, data, max_iters=10, save_interval=2, keep_last=-1, resume_step=4)
    assert curve(run) == curve(ten) and tensors(run, 10) == tensors(ten, 10)
    aside = next(run.glob("set_aside_*"))
    assert sorted(os.listdir(aside / "checkpoints")) == [f"step_{s:08d}" for s in (6, 8, 10)]
    result = train(run, data, max_iters=12, save_interval=2, keep_last=-1, resume_step=4)  # the same command, extended: goes on
    assert "update 10" in result.out and len(list(run.glob("set_aside_*"))) == 1
    result = train(run, data, expect=2, max_iters=12, resume_step=5)
    assert len(result.errors) == 1 and "2, 4, 6, 8, 10" in result.errors[0]


def test_starting_anew_sets_the_earlier_run_aside(run, ten, data):
    train(run, data, max_iters=4, lr_decay_iters=10, resume="never")
    assert steps(run) == [4] and list(curve(run)) == [1, 2, 3, 4]
    aside = next(run.glob("set_aside_*"))
    assert (aside / "metrics.jsonl").read_text() == (ten / "metrics.jsonl").read_text() and steps(aside) == [2, 4, 6, 8, 10]
    assert tensors(aside, 10) == tensors(ten, 10)


def test_a_branch_takes_weights_and_optimizer_along_and_starts_at_zero(ten, data, tmp_path):
    branch, bare, fine = tmp_path / "branch", tmp_path / "bare", tmp_path / "fine"
    same = dict(lr_schedule="constant", warmup_iters=0, max_iters=1)
    train(branch, data, init_from=ten, **same)
    train(bare, data, init_from=ten, init_optimizer=False, **same)
    a, b = curve(branch), curve(bare)
    assert list(a) == [1] and a[1][:2] == b[1][:2], "the weights are the same"
    assert a[1][0] < curve(ten)[1][0] - 0.5, "and they are trained ones"
    assert tensors(branch, 1) != tensors(bare, 1), "but only one has the moments"
    # the architecture comes from the weights: a config file gives way with a line, the command line must agree
    result = train(fine, data, expect=2, init_from=ten, n_layer=5)
    assert len(result.errors) == 1 and "n_layer is 2" in result.errors[0]
    config = tmp_path / "config.py"
    config.write_text("n_layer = 5\n")
    rest = {k: v for k, v in TINY.items() if k != "n_layer"}
    result = forked(1, "train.py", config, f"--out_dir={fine}", f"--dataset={data}", *as_args({**rest, **same}), f"--init_from={ten}")
    assert result.code == 0 and "n_layer is 2" in result.out
    again = forked(1, "train.py", config, f"--out_dir={fine}", f"--dataset={data}", *as_args({**rest, **same, "max_iters": 2}),
                       f"--init_from={ten}")
    assert again.code == 0 and "going on from" in again.out, again.err


def test_a_branch_may_have_a_smaller_context(ten, data, tmp_path):
    train(tmp_path / "crop", data, init_from=ten, block_size=8, max_iters=1)
    result = train(tmp_path / "grow", data, expect=2, init_from=ten, block_size=32, max_iters=1)
    assert len(result.errors) == 1 and "block_size is 16" in result.errors[0]
    assert not (tmp_path / "grow").exists()


def test_a_manifest_tells_the_whole_story(ten):
    manifest = json.loads((ten / "checkpoints" / "step_00000010" / "manifest.json").read_text())
    assert manifest["step"] == 10 and manifest["samples"] == 80 and manifest["tokenizer"]["kind"] == "byte"
    assert manifest["config"]["n_embd"] == 48 and manifest["versions"]["torch"] and set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors"}
    assert manifest["versions"]["processor"] == processor()
    assert not any(name.startswith(("_orig_mod", "module.")) for name in manifest["tensors"]["model"])
    assert json.loads((ten / "config.json").read_text())["config"]["learning_rate"] == 0.01


def test_an_evaluation_that_was_interrupted_is_made_up_for(data, tmp_path):
    run = tmp_path / "run"
    train(run, data, max_iters=4, eval_interval=2, save_interval=2)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"kind": "val"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[:last]))  # as after a kill inside it
    train(run, data, max_iters=4, eval_interval=2, save_interval=2)
    assert [r["step"] for r in records(run, "val")] == [2, 4]


def test_going_back_keeps_the_later_curve_aside(run, ten, data):
    before = (run / "metrics.jsonl").read_text()
    train(run, data, max_iters=4, lr_decay_iters=10, resume_step=4)
    aside = next(run.glob("set_aside_*"))
    assert (aside / "metrics.jsonl").read_text() == before and list(curve(run)) == [1, 2, 3, 4]


def test_looking_only_touches_nothing(run, data):
    before = (run / "metrics.jsonl").read_text()
    train(run, data, max_iters=10, resume_step=4, eval_only=True)
    assert (run / "metrics.jsonl").read_text() == before and steps(run) == [2, 4, 6, 8, 10] and not list(run.glob("set_aside_*"))


def test_garbage_in_the_log_costs_only_itself(run, data):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:3], b"\xff\xfe garbage\n", b"5\n", b"{}\n", *lines[3:]]))
    train(run, data, max_iters=11)
    assert sorted(curve(run)) == list(range(1, 12))


def test_a_branch_from_the_folder_that_is_set_aside_is_refused(run, data):
    result = train(run, data, expect=2, init_from=run, resume="never")
    assert len(result.errors) == 1 and "another --out_dir" in result.errors[0] and steps(run) == [2, 4, 6, 8, 10]
    result = train(run, data, expect=2, resume_step=4, resume="never")
    assert len(result.errors) == 1 and "one of the two" in result.errors[0]


@pytest.mark.parametrize("n, parallel", [(1, "single"), pytest.param(2, "fsdp", marks=pytest.mark.full)])
def test_going_on_takes_no_more_memory_than_starting(n, parallel, data, tmp_path):
    """Peak of the largest process: within 10% of a fresh start's plus one copy of the model."""
    settings = {**TINY, "n_layer": 6, "n_head": 8, "n_embd": 512, "max_iters": 2, "parallel": parallel}  # 76 MB of weights
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"] if n > 1 else []

    def peak(**more):
        process = subprocess.Popen([sys.executable, *launch, "train.py", "tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", f"--dataset={data}",
                                    *as_args({**settings, **more})], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0
        return usage.ru_maxrss * 1024

    fresh = peak()
    weights = sum(f["bytes"] for name, f in json.loads((tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json").read_text())["files"].items()
                  if name.startswith("model"))
    resumed = peak(max_iters=4, lr_decay_iters=2)
    assert steps(tmp_path / "run") == [2, 4] and weights > 70e6
    assert resumed <= 1.1 * fresh + weights / n, (resumed, fresh, weights)
