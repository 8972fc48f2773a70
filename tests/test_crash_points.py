"""kill -9 before every single operation of a save on the disk, and what a power cut would find at each renaming.

tests/crash.py makes the runs: forks of one process, killed by a hook on what Python does to files.
"""

import json
import os
import re

import pytest

from conftest import TINY, as_args, curve, records, run_script, tensors, train
from engine.checkpoint import open_checkpoint

SAVES = {"total_batch_size": 32, "dropout": 0.1, "save_interval": 2, "eval_interval": 2, "keep_last": 1, "lr_decay_iters": 6}


def crash(data, home, settings, **asked):
    argv = ["tests/empty_config.py", f"--dataset={data}", *as_args({**TINY, **SAVES, **settings})]
    result = run_script("tests/crash.py", json.dumps({**asked, "argv": argv, "home": str(home)}), timeout=1200)
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def left(run):
    """What a finished run is: its curve, its validation losses, the last checkpoint's tensors, and what lies beside it."""
    return curve(run), [(r["step"], r["loss"]) for r in records(run, "val")], tensors(run, max(curve(run))), sorted(os.listdir(os.path.join(run, "checkpoints")))


def check(killed, whole):
    """Every one of the killed runs had a complete checkpoint from the first one on, and has come to the undisturbed end."""
    had_one, end = False, left(whole)
    assert all(told["signal"] == 9 for told in killed[:-1]) and killed[-1]["signal"] == 0
    for told in killed:
        where = f"killed before {told.get('before')}: {told}"
        assert told["complete"] == told["steps"], f"a step that is not complete: {where}"
        assert told["complete"] or not had_one, f"the only complete checkpoint is gone: {where}"
        had_one = had_one or bool(told["complete"])
        assert told["code"] == 0, f"{where}\n{open(told['log']).read()}"
        assert left(told["run"]) == end, where


@pytest.fixture(scope="module", params=[{}, {"async_save": True}], ids=lambda more: " ".join(map(str, more)) or "plain")
def second_save(request, data, tmp_path_factory):
    """A run's second save, with the first one's deletion and the marking of the best, killed before each of its operations."""
    home = tmp_path_factory.mktemp("crash")
    train(home / "start", data, **{**SAVES, **request.param, "max_iters": 2})
    train(home / "whole", data, **{**SAVES, **request.param, "max_iters": 4})
    (home / "killed").mkdir()
    killed = crash(data, home / "killed", {**request.param, "max_iters": 4}, watch="kill", start=str(home / "start"), inside="checkpoints")
    return killed, home / "whole"


def test_killed_before_any_operation_of_a_save_the_run_goes_on_as_if_undisturbed(second_save):
    killed, whole = second_save
    check(killed, whole)
    points = [told["before"] for told in killed[:-1]]
    for named in ("mkdir .*partial", "write .*partial/model", "sync .*model", "write .*partial/optimizer", "sync .*optimizer", "write .*partial/manifest", "sync .*manifest",
                  "rename .*partial/manifest", r"sync .*partial", "rename checkpoints/step_00000004", "sync checkpoints", r"rename .*step_00000002.old", r"remove .*\.old/manifest",
                  r"rmdir .*00002.old", "link .*best.partial", "rename .*best.old", "rename checkpoints/best", r"remove .*best.old", "rmdir .*best.old"):
        assert any(re.match(named, point) for point in points), f"no kill before {named} among {points}"


def test_killed_before_any_operation_of_a_save_the_best_is_the_best(second_save):
    killed, whole = second_save
    best = lambda run: open_checkpoint(os.path.join(run, "checkpoints", "best")).step
    assert not [told["before"] for told in killed[:-1] if best(told["run"]) != best(whole)]


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"keep_last": 2, "optimizer": "muon"}, {"async_save": True}], ids=["plain", "muon", "async"])
def test_killed_before_any_operation_of_a_whole_run(more, data, tmp_path):
    settings = {**more, "max_iters": 6}
    train(tmp_path / "whole", data, **{**SAVES, **settings})
    (tmp_path / "killed").mkdir()
    killed = crash(data, tmp_path / "killed", settings, watch="kill")
    assert len(killed) > 80
    check(killed, tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------------- a power cut


@pytest.fixture(scope="module", params=[{}, {"async_save": True}], ids=lambda more: " ".join(map(str, more)) or "plain")
def synced(request, data, tmp_path_factory):
    """Every renaming and removal in the folder of a run, each with what was on the disk just before it."""
    return crash(data, tmp_path_factory.mktemp("sync"), {**request.param, "max_iters": 6}, watch="sync")[0]


def named(synced, name):
    """The moments at which something in the run's folder got a name that this pattern describes."""
    found = [s for s in synced if s["what"] == "rename" and re.fullmatch(name, s["target"])]
    assert found
    return found


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(synced):
    moments = named(synced, r"checkpoints/step_\d+")
    assert len(moments) == 3 and [s["not on disk"] for s in moments] == [[]] * 3


def test_an_older_checkpoint_goes_when_the_newer_ones_name_is_on_the_disk(synced):
    gone = [s for s in synced if re.match(r"checkpoints/step_\d+", s["path"])]
    assert [s["path"] for s in gone] == ["checkpoints/step_00000002", "checkpoints/step_00000004"], "no file of one goes before it has lost its name"
    for s in gone:
        assert max(n for n in s["names on disk"] if n.startswith("step_")) > os.path.basename(s["path"]), s


def test_the_best_gets_its_name_when_all_of_it_is_on_the_disk(synced):
    assert not any(s["not on disk"] for s in named(synced, "checkpoints/best"))


def test_the_curve_up_to_a_checkpoint_is_on_the_disk_before_it(synced):
    for s in named(synced, r"checkpoints/step_\d+"):
        assert s["curve on disk"] >= int(s["target"].rpartition("_")[2]), s


def test_the_curve_is_cut_at_a_resume_without_a_moment_when_the_disk_has_none(synced):
    assert not any(s["not on disk"] for s in named(synced, "metrics.jsonl"))
