"""What ranks send and how long they wait, as a user asks for it: the plan's bytes in every layout, the same curve, a slow rank that the others wait for."""

import json

import pytest

from conftest import TINY, as_args, curve, records, torchrun, train
from engine.config import load_config
from engine.plan import plan

REPORT = {**TINY, "max_iters": 5, "comm_report": 2, "total_batch_size": 8 * 32, "dtype": "float32", "n_head": 4, "n_kv_head": 2, "mlp_hidden": 132}
MODERN = dict(norm="rmsnorm", pos="rope", mlp="swiglu", tie_embeddings=False)
LAYOUTS = {  # name: (settings, kinds that travel beside gradients)
    "ddp": ({}, set()), "ddp-deterministic": (dict(deterministic=True), set()),
    "fsdp": (dict(parallel="fsdp", optimizer="muon"), {"parameters", "Muon's matrices"}), "hsdp": (dict(dp_replicate=2, **MODERN), {"parameters"}),
    "hsdp-deterministic": (dict(dp_replicate=2, deterministic=True), {"parameters"}), "cp": (dict(cp=2, **MODERN), {"keys and values"}),
    "tp": (dict(tp=2, activation_checkpointing="block", **MODERN), {"parameters", "activations"}),
    "tp-cp": (dict(tp=2, cp=2), {"keys and values", "activations", "parameters"}),
}
SLOW = """
import time as _time, os as _os
from model import Block as _Block
def _slow(block, *a, forward=_Block.forward, **k):
    _time.sleep(0.05 if _os.environ["RANK"] == "1" else 0)
    return forward(block, *a, **k)
_Block.forward = _slow
"""


@pytest.fixture(scope="module")
def reported(data, tmp_path_factory):
    """(folder of the runs, what was printed for each): one of each layout, DDP also without a report, and with a rank that is slow."""
    folder = tmp_path_factory.mktemp("communication")
    (folder / "slow.py").write_text(SLOW)
    runs = {**{name: ("tests/empty_config.py", settings) for name, (settings, _) in LAYOUTS.items() if "deterministic" not in name},
            "plain": ("tests/empty_config.py", dict(comm_report=0)), "plain tp": ("tests/empty_config.py", {**LAYOUTS["tp"][0], "comm_report": 0}),
            **{name: ("tests/empty_config.py", settings) for name, (settings, _) in LAYOUTS.items() if "deterministic" in name},  # the mode stays on
            "slow": (str(folder / "slow.py"), {})}
    commands = [[config, f"--out_dir={folder / name}", f"--dataset={data}", *as_args({**REPORT, **settings})] for name, (config, settings) in runs.items()]
    result = torchrun(4, "tests/several.py", json.dumps(commands))
    assert result.code == 0, result.out[-3000:] + result.err[-5000:]
    said = result.out.split("communication of updates ")[1:]
    return folder, dict(zip([name for name in runs if not name.startswith("plain")], said, strict=True))


def found(folder, name):
    (event,) = [r for r in records(folder / name, "event") if r["event"] == "communication"]
    return event


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_counted_is_what_was_planned(name, reported, data):
    folder, said = reported
    event, (settings, kinds) = found(folder, name), LAYOUTS[name]
    assert event["updates"] == [4, 5] and set(event["planned"]) == {"gradients", *kinds}
    config = load_config(["tests/empty_config.py", f"--dataset={data}", *as_args({**REPORT, **settings})], None)
    planned = plan(config, 4)["sent"]  # as --plan=4 says it
    for kind in event["planned"]:
        expected = sum(b for of, b in planned.items() if of.endswith(f" of {kind}"))
        assert event["planned"][kind] == expected and len(event["sent"][kind]) == 4
        for measured in event["sent"][kind]:
            assert measured == pytest.approx(expected, abs=3), kind
    assert set(event["sent"]) == {"losses and norms", *event["planned"]} and max(event["sent"]["losses and norms"]) < 5_000
    assert said[name].startswith("4 to 5: bytes") and said[name].count(" 1.000\n") == len(event["planned"]), said[name]


def test_a_report_leaves_the_curve_as_it_is(reported):
    folder, _ = reported
    assert curve(folder / "plain") == curve(folder / "ddp") and curve(folder / "plain tp") == curve(folder / "tp")
    assert [r for r in records(folder / "plain", "event") if r["event"] == "communication"] == []


def test_the_others_wait_for_a_rank_that_is_slow(reported):
    """Two micro-batches of two blocks, 0.2 s of an update, beside which the rest is little."""
    folder, said = reported
    event = found(folder, "slow")
    waiting = event["waiting"]
    for rank in (0, 2, 3):
        assert waiting[rank] > waiting[1] + 0.4 and waiting[rank] * event["seconds"] > 0.15 and 0 <= waiting[1] <= waiting[rank] <= 1, event
    assert "the others wait for rank 1: " in said["slow"] and "and rank 1 on " in said["slow"]


def test_what_cannot_be_reported_is_one_sentence(data, tmp_path):
    alone = train(tmp_path / "run", data, comm_report=2, expect=2)
    assert len(alone.errors) == 1 and "torchrun" in alone.errors[0] and not (tmp_path / "run").exists()
    few = torchrun(2, "train.py", "tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", f"--dataset={data}", *as_args({**REPORT, "max_iters": 4}))
    told = [line for line in few.err.splitlines() if line.startswith("error:")]
    assert few.code and len(told) == 1 and "comm_report=2 takes 5 updates" in told[0] and not (tmp_path / "run").exists()
