"""A run is known before it starts: the plan against live tensors, every rung rehearsed with a process killed, links checked."""

import glob
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT, TINY, as_args, curve, forked, records, run_script, steps, torchrun
from engine.config import Config, load_config, make_model_config, resolve
from engine.errors import UserError
from engine.plan import plan, size
from engine.recompute import KINDS, choose, kept_bytes, peak_bytes
from model import GPT

# every rung: processes, layout, the smallest GPU that it says it needs, and the processes and the mesh of its rehearsal
RUNGS = {
    "quickstart": (1, "single", "T4", 1, (1, 1, 1, 1)),
    "shakespeare_char": (1, "single", "T4", 1, (1, 1, 1, 1)),
    "shakespeare_char_cpu": (1, "single", "T4", 1, (1, 1, 1, 1)),
    "gpt2_124m": (1, "single", "RTX 4090", 1, (1, 1, 1, 1)),
    "gpt2_124m_muon": (1, "single", "RTX 4090", 1, (1, 1, 1, 1)),
    "gpt2_124m_ddp": (8, "ddp", "RTX 4090", 2, (1, 1, 1, 1)),
    "gpt2_124m_2node": (2, "ddp", "RTX 4090", 2, (1, 1, 1, 1)),
    "gpt2_350m": (4, "ddp", "RTX 4090", 2, (1, 1, 1, 1)),
    "gpt2_350m_long": (8, "ddp", "RTX 4090", 4, (1, 1, 2, 1)),
    "gpt2_774m_fsdp": (8, "fsdp", "RTX 4090", 2, (1, 2, 1, 1)),
    "gpt2_1558m_fsdp": (8, "fsdp", "RTX 4090", 2, (1, 2, 1, 1)),
    "llama_8b_hsdp": (16, "fsdp", "H100", 4, (2, 2, 1, 1)),
    "llama_8b_tp_fsdp": (16, "fsdp", "H100", 4, (1, 2, 1, 2)),
    "sft_quickstart": (1, "single", "T4", 1, (1, 1, 1, 1)),
    "qwen3_sft": (1, "single", "RTX 4090", 1, (1, 1, 1, 1)),
    "qwen3_8b_sft_fsdp": (8, "fsdp", "H100", 2, (1, 2, 1, 1)),
}
BRIEF = ("sft_quickstart", "llama_8b_hsdp")  # rehearsed by default: one process and SFT, replicas of shards


def config_of(*argv):
    return load_config(list(map(str, argv)), "tests/empty_config.py")


# ---------------------------------------------------------------------------------------------------- the plan is what is held

# rows that do not divide by the shards, and a norm of 6 values, of which the last of four shards holds none
UNEVEN = {**TINY, "n_embd": 45, "mlp_hidden": 131, "block_size": 15, "total_batch_size": 8 * 30, "max_iters": 3, "dtype": "float32"}
LONGER = dict(block_size=16, total_batch_size=8 * 32, n_embd=44, mlp_hidden=132, n_head=4)  # what a mesh asks to be even
MODERN = dict(tie_embeddings=False, norm="rmsnorm", pos="rope", mlp="swiglu", qk_norm=True, n_head=4, n_kv_head=2, head_dim=6)
LORA = dict(lora_rank=3, init_from="scratch")
COUNTED: dict = {  # processes: {name: settings}
    1: {"single": {}, "muon": dict(optimizer="muon")},
    2: {"ddp": {}, "ddp-muon": dict(optimizer="muon"), "ddp-lora": LORA, "fsdp-lora": dict(parallel="fsdp", **LORA, **MODERN), "fsdp": dict(parallel="fsdp"), "fsdp-bfloat16": dict(parallel="fsdp", dtype="bfloat16", bias=True, optimizer="muon", **MODERN),
        "ddp-deterministic": dict(deterministic=True, total_batch_size=24 * 30)},
    4: {"ddp": {}, "fsdp": dict(parallel="fsdp", activation_checkpointing="block", dropout=0.1),
        "fsdp-kept": dict(parallel="fsdp", reshard_after_forward=False, activation_checkpointing="selective"), "fsdp-deterministic": dict(parallel="fsdp", deterministic=True, **MODERN),
        "hsdp-lora-deterministic": dict(parallel="fsdp", dp_replicate=2, deterministic=True, optimizer="muon", lora_targets="q,up", **LORA),
        "hsdp": dict(parallel="fsdp", dp_replicate=2), "hsdp-deterministic": dict(parallel="fsdp", dp_replicate=2, deterministic=True),
        "fsdp-muon": dict(parallel="fsdp", optimizer="muon", activation_checkpointing="selective", **MODERN),
        "cp4": dict(cp=4, **LONGER), "cp2-fsdp": {**LONGER, **MODERN, "cp": 2, "parallel": "fsdp", "activation_checkpointing": "block"},
        "tp2-cp2": {**LONGER, **MODERN, "tp": 2, "cp": 2, "bias": True, "activation_checkpointing": "selective"}, "tp2-fsdp": dict(tp=2, activation_checkpointing="block", **LONGER)},
}


@pytest.fixture(scope="module")
def counted(data, tmp_path_factory):
    """{(processes, name): (plan, [what each rank counted], run)} of real runs; see tests/counting.py."""
    folder, found = tmp_path_factory.mktemp("counted"), {}
    for ranks, variants in COUNTED.items():
        commands = [["tests/counting.py", f"--out_dir={folder / f'{ranks}-{name}'}", f"--dataset={data}",
                     *as_args({**UNEVEN, **settings})] for name, settings in variants.items()]
        result = forked(ranks, "tests/several.py", json.dumps(commands))
        assert result.code == 0, result.out[-3000:] + result.err[-5000:]
        for name, command in zip(variants, commands):
            run = folder / f"{ranks}-{name}"
            planned = plan(config_of("tests/empty_config.py", *command[1:]), ranks)
            found[ranks, name] = planned, [json.loads((run / f"counted_{r}.json").read_text()) for r in range(ranks)], run
    return found


NAMES = [(ranks, name) for ranks, variants in COUNTED.items() for name in variants]


@pytest.mark.parametrize("ranks, name", NAMES)
def test_planned_weights_gradients_and_optimizer_are_the_bytes_that_each_rank_holds(ranks, name, counted):
    planned, ranks_counted, _ = counted[ranks, name]
    for rank, live in enumerate(ranks_counted):
        assert (live["weights"], live["gradients"], live["optimizer"]) == planned["shards"][rank % len(planned["shards"])], rank
    first = ranks_counted[0]
    assert [planned["memory"][kind] for kind in ("weights", "gradients", "optimizer")] == [first["weights"], first["gradients"], first["optimizer"]]
    assert max(live["weights"] for live in ranks_counted) == first["weights"], "rank 0 is the fullest"


@pytest.mark.parametrize("ranks, name", NAMES)
def test_planned_traffic_is_what_the_collectives_of_an_update_carry(ranks, name, counted):
    def by_collective(sent):
        kinds = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
        return {kind: sum(b for name, b in sent.items() if name.replace("_", "-").startswith(kind)) for kind in kinds}

    planned, ranks_counted, _ = counted[ranks, name]
    for live in ranks_counted:
        assert by_collective(live["sent"]) == pytest.approx(by_collective(planned["sent"]), abs=1)


@pytest.mark.parametrize("ranks, name", NAMES)
def test_a_planned_checkpoint_has_the_size_of_a_saved_one(ranks, name, counted):
    planned, _, run = counted[ranks, name]
    files = glob.glob(f"{run}/checkpoints/step_00000003/*.safetensors")
    assert 0 <= sum(map(os.path.getsize, files)) - planned["checkpoint"] < 16_384 * len(files)  # names and places in a header each


def kept_for_backward(c, kinds):
    """Bytes that autograd keeps of a forward on the CPU, but for parameters (autocast's copies of them too) and the head's gradient."""
    model = GPT(make_model_config(c))
    model.init_weights(0)
    for block, kind in zip(model.blocks, kinds):
        block.recompute = kind
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2} | {tuple(p.shape)[::-1] for p in model.parameters() if p.dim() == 2}
    own, kept = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}, {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own and tuple(t.shape) not in shapes:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    tokens = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, enabled=c.dtype == "bfloat16"):
        model(tokens, tokens)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def sized(**settings):
    c = Config(**{**dict(n_layer=4, n_head=4, n_embd=256, block_size=192, batch_size=4, vocab_size=500, bias=True, compile=False, device="cpu"), **settings})
    resolve(c)
    make_model_config(c)  # fills in the derived sizes
    return c


@pytest.mark.quick
@pytest.mark.parametrize("dtype, rows", [("float32", 4), ("float32", 22), ("bfloat16", 4)])  # 22: above engine.matmul.WORTH
def test_planned_activations_are_near_what_autograd_keeps(dtype, rows):
    element, last = 2 if dtype == "bfloat16" else 4, rows * 192 * 8 * 256  # the last norm's input and the hidden state's gradient
    c = sized(dtype=dtype, batch_size=rows)
    for kinds in [["none"] * 4, ["selective"] * 4, ["block"] * 4, ["block", "selective", "none", "none"]]:
        planned = sum(kept_bytes(c, element)[kind] for kind in kinds) + last
        assert planned == pytest.approx(kept_for_backward(c, kinds), rel=0.02), kinds
    if rows == 4:
        c = sized(dtype=dtype, norm="rmsnorm", pos="rope", mlp="swiglu", n_kv_head=2)
        kept = kept_for_backward(c, ["none"] * 4)
        assert 0.8 * kept < peak_bytes(c, element, ["none"] * 4) < 1.02 * kept  # a CPU's RMSNorm keeps its output too, a GPU's fused one does not


@pytest.mark.quick
def test_a_budget_picks_the_cheapest_that_fits_block_by_block():
    c = sized(n_layer=6)
    peaks = {kind: peak_bytes(c, 4, [kind] * 6) for kind in KINDS}
    assert peaks["none"] > peaks["selective"] > peaks["block"]
    before = 10
    for budget in range(peaks["block"], peaks["none"] + 10**6, 500_000):
        c.activation_budget = budget / 1e9
        kinds = choose(c, 4)
        assert peak_bytes(c, 4, kinds) <= budget and len(kinds) == 6
        again = sum({"none": 0, "selective": 1, "block": 1.5}[kind] for kind in kinds)  # of what is computed a second time, more or less
        assert again <= before, "more memory, less to compute again"
        before = again
    assert kinds == ["none"] * 6
    c.activation_budget = peaks["block"] / 2e9
    with pytest.raises(UserError) as error:
        choose(c, 4)
    sentence = error.value.sentences[0]
    for words in ("4 x 192", "even where all of its blocks"):
        assert words in sentence
    for works in re.findall(r"(activation_budget|batch_size)=([\d.]+)(?= or| would)", sentence):
        assert choose(sized(**{"n_layer": 6, "activation_budget": c.activation_budget, works[0]: float(works[1]) if "." in works[1] else int(works[1])}), 4)


@pytest.mark.quick
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_plans_for_its_own_processes_and_fits_the_gpu_it_names(name):
    processes, layout, gpu, _, _ = RUNGS[name]
    p = plan(config_of(f"configs/{name}.py", f"--plan_gpu={gpu}"), processes)
    assert p["layout"] == layout and sum(p["memory"].values()) < p["gpu_memory"]
    assert p["hours"] == pytest.approx(p["flops"] / processes / p["peak"] / 0.4 / 3600)


@pytest.mark.quick
def test_the_rungs_have_the_sizes_of_the_models_that_they_name():
    """Against the sizes that the models' authors give, which count no padding of the vocabulary."""
    def parameters(name):
        c = config_of(f"configs/{name}.py")
        return plan(c, RUNGS[name][0])["parameters"] - (0 if name.startswith(("llama", "qwen")) else (50_304 - 50_257) * c.n_embd)

    assert [parameters(n) for n in ("gpt2_124m", "gpt2_350m", "gpt2_774m_fsdp", "gpt2_1558m_fsdp", "llama_8b_hsdp", "qwen3_sft", "qwen3_8b_sft_fsdp")] == [
        124_439_808, 354_823_168, 774_030_080, 1_557_611_200, 8_030_261_248, 596_049_920, 8_190_735_360]


@pytest.mark.quick
def test_every_config_opens_with_what_it_teaches_needs_and_shows():
    assert {os.path.basename(f)[:-3] for f in glob.glob(f"{ROOT}/configs/*.py")} == set(RUNGS)
    for name in RUNGS:
        with open(f"{ROOT}/configs/{name}.py", encoding="utf-8") as f:
            text = f.read().split('"""')[1]
        assert re.findall(r"^[A-Z]\w+(?=  )", text, re.M)[:5] == ["Teaches", "Needs", "Data", "Start", "Watch"], name


@pytest.mark.quick
def test_a_plan_is_printed_without_training(tmp_path):
    result = forked(1, "train.py", "configs/llama_8b_hsdp.py", "--plan=16", f"--out_dir={tmp_path / 'run'}", "--activation_checkpointing=none")
    assert result.code == 0 and not (tmp_path / "run").exists() and not result.err
    for words in ("dp_replicate 2, dp_shard 8", "8,030,261,248", "H100: too much", "activation_checkpointing=selective or block", "all-gather", "96.4 GB on disk"):
        assert words in result.out, words
    for arguments, words in [(["--plan_gpu=H10"], "H100"), (["--plan=3"], "1, 2, 4"), (["--plan=-1"], "at least 0")]:
        result = forked(1, "train.py", "configs/gpt2_124m.py", "--plan=2", *arguments)
        assert result.code == 2 and len(result.errors) == 1 and words in result.errors[0], result.err


@pytest.mark.quick
def test_sizes_are_readable():
    assert [size(b) for b in (12, 4_300, 498_000_000, 1_490_000_000, 899e9, 1.8e12)] == ["12 B", "4.3 KB", "498 MB", "1.49 GB", "899 GB", "1.8 TB"]


# -------------------------------------------------------------------------------------------------------------- rehearsals


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n not in BRIEF else ()) for n in RUNGS])
def test_every_rung_rehearses_with_a_process_killed_on_the_way(name, tmp_path):
    _, layout, _, processes, mesh = RUNGS[name]
    result = run_script("train.py", f"configs/{name}.py", "--rehearse", cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert result.code == 0, result.out + result.err
    assert f"mesh: {layout}, {processes} process" in result.out and ", ".join(f"{axis} {n}" for axis, n in zip(("dp_replicate", "dp_shard", "cp", "tp"), mesh)) in result.out
    assert re.search(r"went on from the checkpoint of update \d+ to the end", result.out) and "each of the 40 updates once" in result.out
    assert not os.listdir(tmp_path), "it leaves nothing behind"


def test_a_rehearsal_that_fails_says_why(tmp_path):
    config = tmp_path / "broken.py"
    config.write_text("from configs.quickstart import *\nimport engine.optim\nengine.optim.AdamW.state = lambda self: 1 / 0\n")
    result = run_script("train.py", config, "--rehearse", env={"TMPDIR": str(tmp_path)})
    assert result.code == 1 and "before its first checkpoint" in result.out and "ZeroDivisionError" in result.out


@pytest.mark.parametrize("name, n", [("gpt2_124m_ddp", 2), pytest.param("llama_8b_hsdp", 4, marks=pytest.mark.full)])
def test_under_torchrun_the_processes_that_are_there_rehearse(name, n, tmp_path):
    result = torchrun(n, "train.py", f"configs/{name}.py", "--rehearse", f"--out_dir={tmp_path / 'run'}", env={"TMPDIR": str(tmp_path)})
    assert result.code == 0 and result.out.count("all is well") == 1 and "update 20, sample" in result.out, result.err
    assert not list(tmp_path.glob("run*")), "nothing is left"


# ------------------------------------------------------------------------------------------------------------------ --check


def test_check_names_every_rank_and_the_slowest_link(tmp_path):
    result = torchrun(2, "train.py", f"--out_dir={tmp_path / 'run'}", "--check", "--device=cpu")
    assert result.code == 0 and not (tmp_path / "run").exists(), result.err
    table = [line.split()[:3] for line in result.out.splitlines() if line[:1] in "01"]
    assert [(row[0], row[2]) for row in table] == [("0", "cpu"), ("1", "cpu")]
    for words in ("all-reduce over 2 processes (gloo)", "us for 4 bytes", "GB/s on the bus", "slowest link: rank 0 on", torch.__version__):
        assert result.out.count(words) >= 1, words
    assert result.out.count("slowest link") == 1
    alone = run_script("train.py", f"--out_dir={tmp_path / 'run'}", "--check")
    assert alone.code == 0 and "nothing to connect" in alone.out


# ------------------------------------------------------------------------------------------------------------- launch files


def test_the_sbatch_file_saves_at_the_end_of_its_time_and_queues_again(data, tmp_path):
    """Slurm's two commands replaced by what they do on one machine; the signal goes to the script alone, as --signal=B: says."""
    script, run = f"{ROOT}/configs/launch/slurm.sbatch", tmp_path / "run"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    for name, text in {"srun": 'shift\nexec "$@"', "scontrol": f'[ "$1" = show ] && echo localhost || echo "$@" > {tmp_path / "requeued"}'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "4242", "NNODES": "1", "GPUS_ON_NODE": "2", "JOB_NODELIST": "localhost", "CPUS_PER_TASK": "2", "SUBMIT_DIR": ROOT}
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}", **{f"SLURM_{k}": v for k, v in slurm.items()}}
    arguments = ["tests/empty_config.py", f"--out_dir={run}", f"--dataset={data}", *as_args({**TINY, "max_iters": 100_000, "save_interval": 100_000})]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(["bash", script, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.time() + 60
    while "step 10/" not in (tmp_path / "log").read_text() and time.time() < deadline:
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    job.wait(timeout=60)
    told = [r["signal"] for r in records(run, "event") if r["event"] == "signal"]
    assert steps(run) == [max(curve(run))] and told == ["SIGUSR1"], (tmp_path / "log").read_text()
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "4242"]


def test_the_kubernetes_file_is_a_pytorchjob_that_starts_torchrun():
    yaml = pytest.importorskip("yaml")
    with open(f"{ROOT}/configs/launch/kubeflow.yaml", encoding="utf-8") as f:
        job = yaml.safe_load(f)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    container = worker["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch" and container["command"][0] == "torchrun"
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
    arguments = container["command"][container["command"].index("train.py") + 1:]
    assert plan(config_of(*arguments), worker["replicas"] * int(spec["nprocPerNode"]))["replicas"] == worker["replicas"]
    volumes = {v["name"] for v in worker["template"]["spec"]["volumes"]}
    assert {m["name"] for m in container["volumeMounts"]} == volumes
