"""What a run shows of itself: its log compared with others', its picture, its lines, and what it tells trackers."""

import fcntl
import gzip
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
import torch

from conftest import ROOT, TINY, Finished, Job, as_args, curve, several, steps, torchrun, train
from engine.config import Config
from engine.console import WINDOW, Console, z_score
from engine.errors import UserError
from engine.metrics import Metrics, compare, last_bit_units, main, read_curve
from engine.processes import Place
from engine.trackers import read_offline


def metrics_command(*words, code):
    done = subprocess.run([sys.executable, "-m", "engine.metrics", *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    result = Finished(done)
    assert result.code == code, result.out + result.err
    return result


def line(step, loss, kind="train", **values):
    return {"kind": kind, "step": step, "loss": loss, **({"grad_norm": 1.0, "lr": 0.1, "tokens": 10 * step} if kind == "train" else {}), **values}


def log(folder, lines, tail=""):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines) + tail)
    return str(folder)


def next_float32(x, n=1):
    return struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", x))[0] + n))[0]


# ------------------------------------------------------------------------------------------------------ comparing runs


def test_one_process_and_two_are_identical_and_a_tampered_line_is_named(data, tmp_path):
    """The tool with which a person sees that layouts draw one curve."""
    settings = dict(max_iters=6, eval_interval=3, deterministic=True)
    one, two, tampered = (tmp_path / name for name in ("one", "two", "tampered"))
    several(1, [(one, data, settings)])
    several(2, [(two, data, settings)])
    same = metrics_command(one, two, code=0)
    assert "are identical: updates 1 to 6 and 2 evaluations, to the last bit" in same.out and str(tmp_path / "curves.png") in same.out
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(text) for text in (two / "metrics.jsonl").read_text().splitlines()]
    found = next(r for r in lines if r["kind"] == "train" and r["step"] == 4)
    found["loss"] = next_float32(found["loss"], 3)
    log(tampered, lines)
    other = metrics_command(one, tampered, two, code=1)
    assert "first differ at step 4: loss" in other.out and "3 float32 ulps apart" in other.out and f"{one} and {two} are identical" in other.out


@pytest.mark.quick
def test_where_two_curves_part():
    def told(a, b):
        one, sentences = compare(*({(r["step"], r["kind"]): {k: v for k, v in r.items() if k not in ("kind", "step")} for r in c} for c in (a, b)), "a", "b")
        return one, "\n".join(sentences)

    whole = [line(s, 3.0 - s / 8) for s in range(1, 9)]
    assert told(whole, whole) == (True, "a and b are identical: updates 1 to 8, to the last bit")
    assert told(whole, whole[:5]) == (True, "a and b are identical: updates 1 to 5, to the last bit\nonly a has updates 6 to 8")
    assert told(whole, whole[2:5])[1].endswith("only a has updates 1 to 2, 6 to 8")
    assert told(whole[:3], whole[4:]) == (False, "a and b have no update in common: updates 1 to 3 and updates 5 to 8")
    assert told(whole, whole[:3] + whole[4:]) == (False, "a and b differ: update 4 is in a only")
    changed = [dict(r, lr=0.2) if r["step"] == 3 else r for r in whole]
    assert told(whole, changed)[0] is False and "first differ at step 3: lr 0.1 and 0.2, " in told(whole, changed)[1]
    evaluated = whole + [line(8, 2.5, "val")]
    assert told(whole, evaluated)[0], "only one of them was evaluated"
    assert "step 8: val loss 2.5 and 2.0" in told(evaluated, whole + [line(8, 2.0, "val")])[1]
    nan = whole + [line(8, math.nan, "val")]
    assert told(nan, nan)[0]


@pytest.mark.quick
@pytest.mark.parametrize("a, b, units", [
    (3.0, next_float32(3.0), "1 float32 ulp"), (next_float32(3.0, 7), 3.0, "7 float32 ulps"), (0.1, math.nextafter(0.1, 1), "1 float64 ulp"),
    (0.0, -0.0, "0 float32 ulps"), (2.0**-149, -(2.0**-149), "2 float32 ulps"), (1e300, math.nextafter(1e300, 2e300), "1 float64 ulp"), (5, 7, "2")])
def test_last_bit_units(a, b, units):
    assert last_bit_units(a, b) == units


@pytest.mark.quick
def test_a_log_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    whole = [line(1, 3.0), {"kind": "event", "step": 1, "event": "saved"}, line(1, 2.5, "val"), line(2, 2.0)]
    assert list(read_curve(log(tmp_path / "a", whole, '{"kind": "train", "st'))) == [(1, "train"), (1, "val"), (2, "train")]


@pytest.mark.quick
def test_what_cannot_be_compared_is_one_sentence(tmp_path):
    good = log(tmp_path / "good", [line(1, 3.0)])
    for bad, words in ((str(tmp_path / "none"), ["none", "No such file", "folder of a run"]), (log(tmp_path / "empty", []), ["no update"]),
                       (log(tmp_path / "torn", [line(1, 3.0)], "{torn\n"), ["line 2"]), (log(tmp_path / "twice", [line(1, 3.0)] * 2), ["line 2", "second time"]),
                       (log(tmp_path / "other", [{"kind": "train", "step": 1}]), ["line 1"]), ("--frob", ["--frob", "--out="]),
                       (f"--out={tmp_path}/no/where.png", ["where.png", "No such file"])):
        with pytest.raises(UserError) as error:
            main([good, bad])
        assert len(error.value.sentences) == 1 and all(word in str(error.value) for word in words), error.value
    result = metrics_command(good, tmp_path / "none", code=2)
    assert len(result.errors) == 1 == len(result.err.splitlines())


# ---------------------------------------------------------------------------------------------------------- the picture


def test_the_picture_of_a_run_marks_each_restart(data, tmp_path):
    run = tmp_path / "run"
    several(1, [(run, data, dict(max_iters=most, lr_decay_iters=30, eval_interval=5)) for most in (10, 20, 30)])
    from matplotlib.image import imread

    pixels = imread(run / "loss.png")[:, :, :3]
    assert pixels.shape == (600, 800, 3)

    def columns(red, green, blue, least):
        """Where a colour stands in so many rows of a column, neighbouring columns as one."""
        near = (abs(pixels - [red / 255, green / 255, blue / 255]) < 0.15).all(2).sum(0) >= least
        return [x for x in range(1, 800) if near[x] and not near[x - 1]]

    restarts = columns(214, 39, 40, least=60)
    assert len(restarts) == 2 and abs((restarts[1] - restarts[0]) - (restarts[0] - 105)) < 25, restarts
    assert columns(255, 127, 14, least=3), "validation"
    assert (pixels[-25:, 300:600] < 0.5).any(), "the axis has a name"


# ---------------------------------------------------------------------------------------------------------- the console

LINE = re.compile(r"step \d+/\d+ *\| loss \d\.\d{4}, smoothed \d\.\d{4} \| lr \d\.\d\de-\d\d \| norm \d+\.\d\d \| [\d,.]+ ms \| [\d.]+k? tokens/s"
                  r"( \([\d.]+k? a device\))?( \| mfu \d+%)? \| \d\.\d\d GB \| (?:\d+h)?(?:\d+m)?\d*s? ?left")


def on_a_terminal(command, columns, env):
    """(what a terminal shows after a command has ended, a line each; everything that it was sent)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm"})
    os.close(theirs)
    sent = b""
    try:
        while piece := os.read(ours, 65536):
            sent += piece
    except OSError:  # its end, on Linux
        pass
    os.close(ours)
    assert process.wait() == 0, sent.decode()
    lines, column = [[]], 0
    for c in sent.decode():
        if c == "\n":
            lines.append([])
        elif c == "\r":
            column = 0
        else:
            lines[-1][column:column + 1] = c if column < len(lines[-1]) else [" "] * (column - len(lines[-1])) + [c]
            column += 1
    return ["".join(line).rstrip() for line in lines], sent.decode()


def test_a_terminal_shows_the_lines_of_a_file_and_a_bar_that_leaves_nothing(data, tmp_path):
    """The bar is drawn at every update here, so that it stands under each thing said. With wandb on, to which nobody has logged in: nor is a question asked."""
    settings = dict(TINY, dataset=data, max_iters=40, log_interval=10, eval_interval=20, eval_tokens=64, sample_tokens=5, wandb_log=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"HOME": str(tmp_path), "TQDM_MININTERVAL": "0"}
    command = [sys.executable, "train.py", "tests/empty_config.py", *as_args(settings)]
    shown, sent = on_a_terminal([*command, f"--out_dir={tmp_path / 'a'}"], 150, env)
    written = subprocess.run([*command, f"--out_dir={tmp_path / 'b'}"], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True).stdout.splitlines()

    def masked(lines):
        return [re.sub(r"norm [\d.]+|[\d.,]+ ms|[\d.]+k? tokens/s|mfu \d+%|(?:\d+m)?\d+s\b|[\d.]+ GB|/[ab]\b", "*", line).rstrip() for line in lines if line]

    assert sum("wandb did not start" in line and "log in" in line for line in written) == 1
    assert "\r" not in "".join(written) and "\x1b" not in "".join(written), "in a file plain lines"
    assert "% |" in sent and "\x1b[1;31m" not in sent and masked(shown) == masked(written)
    assert [line.split("|")[0].strip() for line in written if LINE.fullmatch(line)] == [f"step {s}/40" for s in (1, 10, 20, 30, 40)], written


def test_four_processes_say_each_thing_once(data, tmp_path):
    settings = {**TINY, "dataset": data, "out_dir": tmp_path / "run", "max_iters": 6, "eval_interval": 3, "batch_size": 1, "sample_tokens": 4, "log_interval": 2}
    result = torchrun(4, "train.py", "tests/empty_config.py", *as_args(settings))
    assert result.code == 0, result.err
    said = [re.sub(r" \(best.*|, best.*", "", line) for line in result.out.splitlines() if line.strip()]
    assert len(said) == len(set(said)), [line for line in said if said.count(line) > 1]
    shown = [line for line in said if LINE.fullmatch(line)]
    assert [line.split("|")[0].strip() for line in shown] == [f"step {s}/6" for s in (1, 2, 4, 6)] and all("a device" in line for line in shown)
    told = [line for line in result.err.splitlines() if line.strip(" *") and "OMP_NUM_THREADS" not in line and "torch/distributed/run.py" not in line]
    assert len(told) == len(set(told)) and not any("timed out" in line for line in told), result.err


@pytest.mark.quick
def test_an_unusual_update_has_a_line_of_its_own_that_says_so(tmp_path, capsys):
    assert z_score([1.0] * WINDOW + [9.0]) == 0 and z_score([1.0, 3.0] * (WINDOW // 2) + [9.0]) == 7 and z_score([1.0, 3.0, 90.0]) == 0
    place = Place(device=torch.device("cpu"))
    console = Console(place, Config(max_iters=1000, log_interval=100, total_batch_size=10), Metrics(str(tmp_path), 0), 1, "float32")
    for step in range(1, WINDOW + 3):
        spike = step == WINDOW + 1
        console.metrics.write("train", step, loss=2.0 + 0.1 * (step % 2) + spike, grad_norm=1.0 + 0.1 * (step % 2), lr=0.1, tokens=step, **console.speed(0.1))
        console.update(step, 0.1)
    told = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in told] == ["step 1", "step 100", f"step {WINDOW + 1}"]
    assert told[-1].endswith("| unusual: loss 21.0 standard deviations above its mean") and "unusual" not in told[1]
    console.metrics.go_back(WINDOW)
    console.metrics.write("train", WINDOW + 1, loss=2.1, grad_norm=1.9, lr=0.1, tokens=WINDOW + 1, **console.speed(0.1))
    console.update(WINDOW + 1, 0.1)
    assert capsys.readouterr().out.strip().endswith("| unusual: gradient norm 17.0 standard deviations above its mean"), "it knows what was before the restart"


# --------------------------------------------------------------------------------------------------- wandb, TensorBoard


def test_wandb_offline_has_every_step_once_under_one_id_whatever_was_killed(data, tmp_path):
    settings = dict(max_iters=150, save_interval=50, eval_interval=50, eval_tokens=64, wandb_log=True)
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for reach in (60, 1, None):  # the second start dies before it is as far as the first was
        job = Job(1, tmp_path / "run", data, env=env, **settings)
        if reach:
            job.wait_for(lambda: job.step >= reach)
            job.kill()
    assert job.end() == 0, job.text
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"), key=lambda f: f.stat().st_ctime)
    assert len(folders) == 3 and len({f.name.rsplit("-", 1)[1] for f in folders}) == 1, "one id"
    rows = [row for folder in folders for path in folder.glob('*.wandb') for row in read_offline(path)]
    seen = [row["step"] for row in rows if "train/loss" in row]
    assert sorted(seen) == list(range(1, 151)), "each update once"
    assert [row["step"] for row in rows if "val/loss" in row] == [50, 100, 150]
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == {s: loss for s, (loss, _, _) in curve(tmp_path / "run").items()}


STAND_IN = """
import sys
if "BREAKS_AT" not in __import__("os").environ: raise ImportError("not here")
class StandIn:
    id, summary = "abc", {}
    def __init__(self, *args, **kwargs): pass
    def define_metric(self, *args, **kwargs): pass
    def log(self, values): raise RuntimeError("it broke\\nat length")
Settings, init = StandIn, StandIn
"""


def test_a_tracker_that_is_absent_or_breaks_is_one_sentence_and_the_run_goes_on(data, tmp_path):
    (tmp_path / "wandb.py").write_text(STAND_IN)
    (tmp_path / "tensorboard.py").write_text(STAND_IN)
    absent = train(tmp_path / "absent", data, max_iters=3, wandb_log=True, tensorboard_log=True, env={"PYTHONPATH": str(tmp_path)})
    assert absent.err.splitlines() == ["tensorboard_log=True, but tensorboard did not start (ImportError: not here): going on without it",
                                       "wandb_log=True, but wandb did not start (ImportError: not here): going on without it"]
    breaks = train(tmp_path / "breaks", data, max_iters=3, wandb_log=True, env={"PYTHONPATH": str(tmp_path), "BREAKS_AT": "log"})
    assert breaks.err.splitlines() == ["wandb_log=True, but wandb broke (RuntimeError: it broke): going on without it"]
    assert steps(tmp_path / "absent") == steps(tmp_path / "breaks") == [3]


def test_tensorboard_has_the_curve(data, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for most in (4, 6):
        train(tmp_path / "run", data, max_iters=most, lr_decay_iters=6, eval_interval=2, tensorboard_log=True)
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(s, pytest.approx(v[0])) for s, v in curve(tmp_path / "run").items()]
    assert [e.step for e in found.Scalars("val/loss")] == [2, 4, 6]


# ----------------------------------------------------------------------------------------------------------- the profile


def test_a_profile_is_a_table_and_a_trace_and_changes_nothing(data, tmp_path):
    plain, profiled, short = (tmp_path / name for name in ("plain", "profiled", "short"))
    train(plain, data, max_iters=7)
    result = train(profiled, data, max_iters=7, profile=2)
    assert curve(plain) == curve(profiled)
    (path,) = (profiled / "profile").iterdir()
    assert path.name == "updates_4_to_5.json.gz" and str(path) in result.out
    with gzip.open(path) as f:
        names = [event.get("name") or "" for event in json.load(f)["traceEvents"]]
    assert {n for n in names if n.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"} and "aten::mm" in names
    lines = result.out[result.out.index("the 10 most expensive of"):].splitlines()[1:11]
    shares = [float(line.split("%")[0]) for line in lines]
    assert all(re.fullmatch(r" *[\d.]+% +[\d.,]+ ms +[\d,]+ calls an update   [\w:]+.*", line) for line in lines), lines
    of = int(re.search(r"the 10 most expensive of (\d+)", result.out)[1])
    assert shares == sorted(shares, reverse=True) and 100 * 10 / of <= sum(shares) + 0.5 and sum(shares) <= 100.5, (of, shares)  # how much more than that is the machine's affair
    assert any("aten::" in line for line in lines)
    refused = train(short, data, expect=2, max_iters=4, profile=2)
    assert len(refused.errors) == 1 and "takes 5 updates" in refused.errors[0] and not short.exists()
