"""One curve on any mesh: processes that share sequences (cp), layers (tp), parameters (fsdp), data, together and in turn."""

import json
import re

import numpy as np
import pytest

from conftest import TINY, as_args, curve, forked, made_up_records, records, several, tensors, write_records

BASE = {**TINY, "learning_rate": 1e-3, "grad_clip": 0.5, "n_head": 4, "n_kv_head": 2, "total_batch_size": 4 * 32, "eval_interval": 20, "eval_tokens": 300,
        "lr_decay_iters": 20, "check_replicas_interval": 5, "sample_tokens": 20}
MODELS = {
    "gpt2": {**BASE, "n_kv_head": 4, "bias": True},
    "qwen3": {**BASE, "norm": "rmsnorm", "pos": "rope", "mlp": "swiglu", "qk_norm": True, "head_dim": 20, "rope_theta": 1e6, "tie_embeddings": False},
}
MODELS["sft"] = {**MODELS["qwen3"], "task": "sft", "sample_tokens": 0}  # records that share rows, and cross the cuts
MESHES: dict = {  # name: (processes, settings)
    "cp2": (2, dict(cp=2)), "tp2": (2, dict(tp=2, activation_checkpointing="selective")), "cp4": (4, dict(cp=4, activation_checkpointing="selective")), "tp2-fsdp2": (4, dict(tp=2)), "cp2-fsdp2": (4, dict(cp=2, parallel="fsdp")),
    "cp2-tp2": (4, dict(cp=2, tp=2, activation_checkpointing="selective")), "cp2-hsdp2": (4, dict(cp=2, dp_replicate=2)), "tp2-hsdp2": (4, dict(tp=2, dp_replicate=2)),
}
DETERMINISTIC: dict = {  # name: (processes, settings), the first of each kind is what the others have to equal
    "cp2": {"one group": (2, {}), "ddp": (4, {}), "fsdp": (4, dict(parallel="fsdp"))},
    "tp2": {"one group": (2, {}), "fsdp": (4, {})},
}
PAIRS = [(mesh, model) for mesh in MESHES for model in MODELS]
SOME = [("tp2", "gpt2"), ("cp4", "qwen3"), ("cp2-tp2", "sft")]  # goes_on has cp2, tp2-fsdp2 and cp2-fsdp2
GOES_ON = [(4, dict(tp=2, max_iters=5)), (2, dict(cp=2, max_iters=9)), (1, dict(max_iters=14)),  # processes, settings
           (4, dict(tp=2, max_iters=18)), (4, dict(cp=2, parallel="fsdp", max_iters=20))]


def make_runs(folder, data, pairs, deterministic=()):
    """folder/<mesh>-<model> of each pair and of one process, and the runs of DETERMINISTIC; returns what was printed by each size of group."""
    rows = [5, 9, 12, 3, 16, 7, 8, 2, 11] * 12
    sets = {"sft": write_records(folder / "records", train=made_up_records(rows), val=made_up_records(rows[:30], seed=1))}
    jobs = {4: [], 2: [], 1: [(folder / f"single-{model}", sets.get(model, data), settings) for model, settings in MODELS.items()]}
    for n, more in GOES_ON[:3]:
        jobs[n].append((folder / "goes on", data, {**MODELS["qwen3"], "sample_tokens": 0, **more}))
    for mesh, model in pairs:
        n, more = MESHES[mesh]
        jobs[n].append((folder / f"{mesh}-{model}", sets.get(model, data), {**MODELS[model], **more}))
    for kind in deterministic:  # at the end: what the mode switches on stays on
        for name, (n, more) in DETERMINISTIC[kind].items():
            of_kind = {**MODELS["qwen3"], "deterministic": True, "max_iters": 4, "sample_tokens": 0, kind[:2]: int(kind[2:])}
            jobs[n].append((folder / f"{kind}-{name}", data, {**of_kind, **more}))
    return {n: several(n, found).out for n, found in jobs.items()}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    return folder, make_runs(folder, data, SOME)


def assert_one_curve(a, b):
    one, other = curve(a), curve(b)
    assert list(one) == list(other) == list(range(1, 21))
    for step in one:
        assert other[step][0] == pytest.approx(one[step][0], rel=1e-5) and other[step][1] == pytest.approx(one[step][1], rel=1e-5), step
    a, b = records(a, "val")[-1], records(b, "val")[-1]
    assert b["loss"] == pytest.approx(a["loss"], rel=1e-5) and b.get("accuracy") == a.get("accuracy")


def assert_same_weights(a, b):
    """To 2e-5, but for key biases: a softmax does not feel them, so their gradients are rounding alone."""
    one, other = tensors(a, 20), tensors(b, 20)
    assert list(one) == list(other)
    for name in one:
        if name.startswith("model/") and not name.endswith("attn.k.bias"):
            assert np.abs(np.frombuffer(one[name], np.float32) - np.frombuffer(other[name], np.float32)).max() < 2e-5, name


@pytest.mark.parametrize("mesh, model", SOME)
def test_every_mesh_draws_the_curve_of_one_process(mesh, model, runs):
    folder, _ = runs
    if model == "sft":
        assert 0 < records(folder / "single-sft", "val")[-1]["accuracy"] < 1, "it says something"
    assert_one_curve(folder / f"single-{model}", folder / f"{mesh}-{model}")
    assert_same_weights(folder / f"single-{model}", folder / f"{mesh}-{model}")


@pytest.mark.full
def test_replicas_and_every_model_on_every_mesh_too(data, tmp_path):
    pairs = [pair for pair in PAIRS if pair not in SOME]
    make_runs(tmp_path, data, pairs)
    for mesh, model in pairs:
        assert_one_curve(tmp_path / f"single-{model}", tmp_path / f"{mesh}-{model}")
        assert_same_weights(tmp_path / f"single-{model}", tmp_path / f"{mesh}-{model}")


@pytest.mark.parametrize("mesh, axes", [("cp4-qwen3", (1, 1, 4, 1)), ("cp2-tp2-sft", (1, 1, 2, 2))])
def test_the_mesh_stands_in_the_runs_config(mesh, axes, runs):
    saved = json.loads((runs[0] / mesh / "config.json").read_text())
    assert saved["mesh"] == dict(zip(("dp_replicate", "dp_shard", "cp", "tp"), axes))


def test_every_mesh_writes_the_sample_of_one_process(runs):
    """The text of each run's end, which all ranks make together: whole, in parts of layers, with gathered weights."""
    samples = {n: re.findall(r"--- sample\n(.*?)\n---\n", out, re.S) for n, out in runs[1].items()}
    one = dict(zip([model for model in MODELS if model != "sft"], samples[1], strict=True))
    assert one["gpt2"] != one["qwen3"]
    for n in (2, 4):
        assert samples[n] == [one[model] for mesh, model in SOME if MESHES[mesh][0] == n and model in one]


@pytest.mark.full
def test_deterministic_is_the_same_bits_for_a_fixed_cp_and_tp(data, tmp_path):
    make_runs(tmp_path, data, [], DETERMINISTIC)
    for kind, meshes in DETERMINISTIC.items():
        for mesh in list(meshes)[1:]:
            one, other = tmp_path / f"{kind}-one group", tmp_path / f"{kind}-{mesh}"
            assert curve(one) == curve(other) and tensors(one, 4) == tensors(other, 4), (kind, mesh)
            assert records(one, "val") == records(other, "val")


def test_a_run_goes_on_under_other_meshes_and_back(runs, data):
    run = runs[0] / "goes on"
    several(4, [(run, data, {**MODELS["qwen3"], **more}) for _, more in GOES_ON[3:]])
    assert [r["step"] for r in records(run, "event") if r["event"] == "resumed"] == [5, 9, 14, 18]
    whole = runs[0] / "single-qwen3"
    assert_one_curve(whole, run)
    assert_same_weights(whole, run)


# ---------------------------------------------------------------------------------------------- bad input: one sentence


def refused(n, data, tmp_path, **settings):
    arguments = ["tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", f"--dataset={data}", *as_args({**BASE, **settings})]
    result = forked(n, "train.py", *arguments)
    told = [line for line in (result.err + result.out).splitlines() if line.startswith("error:")]
    assert result.code and len(told) == 1 and not (tmp_path / "run").exists(), result.err
    return told[0]


def test_a_mesh_that_does_not_divide_the_processes_is_one_sentence_with_what_works(data, tmp_path):
    assert "cp=3 does not divide 2 processes: cp=1 or 2" in refused(2, data, tmp_path, cp=3)
    told = refused(2, data, tmp_path, cp=2, tp=2)
    assert "cp=2 * tp=2 does not divide 2 processes" in told and "cp=1, or tp=1, or 4 processes would work" in told
    assert "torchrun --standalone" in refused(1, data, tmp_path, cp=2)


@pytest.mark.quick
@pytest.mark.parametrize("settings, words", [
    (dict(cp=4), ["block_size=20", "2 * cp = 8", "block_size=16 or 24 would work"]),
    (dict(tp=4, block_size=16), ["tp=4", "n_kv_head=2", "tp=1 or 2 would work"]),
    (dict(cp=2, dropout=0.1), ["dropout=0.1", "dropout=0 would work"]), (dict(tp=2, dropout=0.1), ["dropout=0.1", "dropout=0 would work"]),
    (dict(tp=8, n_head=24, n_kv_head=24, n_embd=48, mlp_hidden=100, block_size=16), ["mlp_hidden=100", "tp=1 or 2 or 4"]),
    (dict(tp=2, parallel="ddp"), ["parallel=fsdp or auto"]), (dict(tp=2, optimizer="muon"), ["optimizer=adamw would work"]),
    (dict(tp=2, lora_rank=4, init_from="scratch"), ["lora_rank=4 with tp=2", "tp=1 would work"]),
    (dict(tp=3, ranks=9, n_head=6, n_kv_head=3, n_embd=48, mlp_hidden=129, block_size=18, total_batch_size=9 * 36), ["padded vocabulary", "tp=1 would work"]),
    (dict(cp=2, device="cuda", dtype="bfloat16", n_embd=48), ["head_dim=12 with cp=2", "head_dim=8 or 16 would work"]),
    (dict(cp=2, device="cuda", dtype="bfloat16", head_dim=260), ["head_dim=260", "head_dim=256 would work"]),
    (dict(cp=2, tp=2, dp_replicate=4), ["dp_replicate=4 * cp=2 * tp=2 does not divide 8 processes", "dp_replicate=1 or 2", "16 processes"]),
    (dict(cp=8, block_size=16, total_batch_size=3 * 32), []), (dict(cp=2, total_batch_size=3 * 40), ["4 groups of cp * tp = 2 * 1 processes", "1, 3 would work"])])
def test_what_does_not_fit_a_mesh_is_one_sentence_with_what_works(settings, words):
    """As --plan finds it, without starting processes: the same checks."""
    from engine.config import Config
    from engine.errors import UserError
    from engine.plan import plan

    settings = {**BASE, "block_size": 20, "total_batch_size": 8 * 40, "dtype": "float32", "vocab_size": 257, "device": "cpu", **settings}
    ranks = settings.pop("ranks", 8)
    if not words:
        assert plan(Config(out_dir="x", **settings), ranks)
        return
    with pytest.raises(UserError) as error:
        plan(Config(out_dir="x", **settings), ranks)
    assert len(error.value.sentences) == 1 and all(word in error.value.sentences[0] for word in words), error.value.sentences
