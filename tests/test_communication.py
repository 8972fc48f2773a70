"""What ranks send and how long they wait, as a user asks for it: the plan's bytes in every layout, the same curve, a slow rank that the others wait for."""

import json

import pytest
import torch

from conftest import TINY, as_args, curve, records, torchrun, train
from engine.communication import CommReport, what_it_means
from engine.config import Config, load_config
from engine.errors import UserError
from engine.plan import plan
from engine.processes import Place

REPORT = {**TINY, "max_iters": 5, "comm_report": 2, "total_batch_size": 8 * 32, "dtype": "float32", "n_head": 4, "n_kv_head": 2, "mlp_hidden": 132}
MODERN = dict(norm="rmsnorm", pos="rope", mlp="swiglu", tie_embeddings=False)
LAYOUTS = {  # name: (settings, kinds that travel beside gradients)
    "ddp": ({}, set()), "fsdp": (dict(parallel="fsdp", optimizer="muon"), {"parameters", "Muon's matrices"}),
    "hsdp": (dict(dp_replicate=2, **MODERN), {"parameters"}), "cp": (dict(cp=2, **MODERN), {"keys and values"}),
    "tp": (dict(tp=2, activation_checkpointing="block", **MODERN), {"parameters", "activations"}),
}
MORE = {  # under the mark full; the deterministic ones last, since the mode stays on
    "tp-cp": (dict(tp=2, cp=2), {"keys and values", "activations", "parameters"}), "ddp-deterministic": (dict(deterministic=True), set()),
    "hsdp-deterministic": (dict(dp_replicate=2, deterministic=True), {"parameters"}),
}
SLOW = """
import time as _time, os as _os
from model import Block as _Block
def _slow(block, *a, forward=_Block.forward, **k):
    _time.sleep(0.05 if _os.environ["RANK"] == "1" else 0)
    return forward(block, *a, **k)
_Block.forward = _slow
"""


def make_runs(folder, data, runs):
    """folder/<name> of each of {name: (config file, settings)}, one after the other on four processes; what was printed of each report."""
    commands = [[config, f"--out_dir={folder / name}", f"--dataset={data}", *as_args({**REPORT, **settings})] for name, (config, settings) in runs.items()]
    result = torchrun(4, "tests/several.py", json.dumps(commands))
    assert result.code == 0, result.out[-3000:] + result.err[-5000:]
    said = result.out.split("communication of updates ")[1:]
    return dict(zip([name for name in runs if not name.startswith("plain")], said, strict=True))


EMPTY = "tests/empty_config.py"


@pytest.fixture(scope="module")
def reported(data, tmp_path_factory):
    """(folder of the runs, what was printed for each): one of each layout, DDP also without a report, and with a rank that is slow."""
    folder = tmp_path_factory.mktemp("communication")
    (folder / "slow.py").write_text(SLOW)
    runs = {name: (EMPTY, settings) for name, (settings, _) in LAYOUTS.items()} | {"plain": (EMPTY, dict(comm_report=0)), "slow": (str(folder / "slow.py"), {})}
    return folder, make_runs(folder, data, runs)


def found(folder, name):
    (event,) = [r for r in records(folder / name, "event") if r["event"] == "communication"]
    return event


def assert_as_planned(event, told, settings, kinds, data):
    assert event["updates"] == [4, 5] and set(event["planned"]) == {"gradients", *kinds}
    config = load_config([EMPTY, f"--dataset={data}", *as_args({**REPORT, **settings})], None)
    planned = plan(config, 4)["sent"]  # as --plan=4 says it
    for kind in event["planned"]:
        expected = sum(b for of, b in planned.items() if of.endswith(f" of {kind}"))
        assert event["planned"][kind] == expected and len(event["sent"][kind]) == 4
        for measured in event["sent"][kind]:
            assert measured == pytest.approx(expected, abs=3), kind
    assert set(event["sent"]) == {"losses and norms", *event["planned"]} and max(event["sent"]["losses and norms"]) < 5_000
    assert told.startswith("4 to 5: bytes") and told.count(" 1.000\n") == len(event["planned"]), told


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_counted_is_what_was_planned(name, reported, data):
    folder, told = reported
    assert_as_planned(found(folder, name), told[name], *LAYOUTS[name], data)


def test_a_report_leaves_the_curve_as_it_is(reported):
    folder, _ = reported
    assert curve(folder / "plain") == curve(folder / "ddp")
    assert [r for r in records(folder / "plain", "event") if r["event"] == "communication"] == []


@pytest.mark.full
def test_so_it_is_on_meshes_and_in_a_fixed_order(data, tmp_path):
    plain = {"plain tp-cp": (EMPTY, {**MORE["tp-cp"][0], "comm_report": 0})}
    told = make_runs(tmp_path, data, plain | {name: (EMPTY, settings) for name, (settings, _) in MORE.items()})
    for name in MORE:
        assert_as_planned(found(tmp_path, name), told[name], *MORE[name], data)
    assert curve(tmp_path / "plain tp-cp") == curve(tmp_path / "tp-cp")


def test_the_others_wait_for_a_rank_that_is_slow(reported):
    """Two micro-batches of two blocks, 0.2 s of an update, beside which the rest is little."""
    folder, said = reported
    event = found(folder, "slow")
    waiting = event["waiting"]
    for rank in (0, 2, 3):
        assert waiting[rank] > waiting[1] + 0.4 and waiting[rank] * event["seconds"] > 0.15 and 0 <= waiting[1] <= waiting[rank] <= 1, event
    assert "the others wait for rank 1: " in said["slow"] and "and rank 1 on " in said["slow"]


def test_on_one_process_there_is_nothing_to_report(data, tmp_path):
    alone = train(tmp_path / "run", data, comm_report=2, expect=2)
    assert len(alone.errors) == 1 and "torchrun" in alone.errors[0] and not (tmp_path / "run").exists()


@pytest.mark.quick
def test_a_report_needs_enough_updates_and_a_run_that_goes_on_does_not_need_a_report(capsys):
    two, config = Place(ranks=2, device=torch.device("cpu")), Config(out_dir="x", comm_report=2, max_iters=4)
    with pytest.raises(UserError, match="comm_report=2 takes 5 updates, 3 of them to warm up, and 4 follow"):
        CommReport(config, two, 0)
    config.max_iters = 8
    assert CommReport(config, two, 3).updates == 2 and not capsys.readouterr().out
    assert CommReport(config, two, 4).updates == 0 and "and 4 follow until max_iters=8: there will be no report" in capsys.readouterr().out


@pytest.mark.quick
def test_what_waiting_means():
    def told(*shares):
        return what_it_means(list(shares), 0.25, Place(ranks=len(shares), hosts=["a", "b", "c", "d"]))

    assert told(0.4, 0.1, 0.42, 0.5) == [
        "an update takes 250.0 ms; of that ranks wait 36% on average, rank 3 the most, 50%, and rank 1 on b the least, 10%",
        "the others wait for rank 1: what it does by itself takes longest"]
    assert told(0.4, 0.42)[1].startswith("all wait alike") and told(0.05, 0.04)[1].startswith("little of it")
