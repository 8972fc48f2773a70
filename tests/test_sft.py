"""SFT in the one loop: the loss is over the labels of the whole update, whoever holds them; resumed, sharded or packed, it is one curve."""

import glob
import json
import math
import os
import shutil
import uuid

import numpy as np
import pytest
import torch

from conftest import ROOT, TINY, as_args, curve, forked, made_up_records, records, run_script, several, steps, tensors, train, write_records
from data.packing import RecordReader
from data.shards import TokenDataset
from engine.config import Config, check_task, load_config
from engine.errors import UserError
from engine.feed import read_folders

SFT = dict(task="sft", block_size=32, total_batch_size=8 * 32, eval_tokens=4 * 32)  # 4 micro-batches of 2 x 32


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """200 records, and 20 to validate on."""
    lengths = np.random.default_rng(2).integers(4, 33, 220)
    found = made_up_records(lengths)
    return write_records(tmp_path_factory.mktemp("chats"), train=found[:200], val=found[200:])


# ---------------------------------------------------------------------------------------------------- the loss of an update


def test_labels_of_10_and_100_make_one_gradient_however_they_are_shared(tmp_path):
    """A rank without any label among them: no hang, no NaN."""
    import ranks

    result = forked(2, "tests/ranks.py", "sft_gradients", tmp_path)
    assert result.code == 0, result.err[-3000:]
    for batch_size in (2, 1):  # at once, and by accumulation
        os.makedirs(tmp_path / str(batch_size))
        ranks.sft_gradients(str(tmp_path / str(batch_size)), batch_size)
    for name in ranks.LABELLED:
        expected = torch.load(tmp_path / "2" / f"{name}-single-0.pt")
        assert sum(g.abs().sum() for g in expected["gradients"].values()) > 1
        for path in (tmp_path / "1" / f"{name}-single-0.pt", *[tmp_path / f"{name}-{layout}-{rank}.pt" for layout in ("ddp", "fsdp") for rank in (0, 1)]):
            found = torch.load(path)
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            for n, g in expected["gradients"].items():
                assert torch.isfinite(found["gradients"][n]).all() and (found["gradients"][n] - g).abs().max() < 1e-6, (path, n)


@pytest.mark.quick
@pytest.mark.parametrize("pack", [True, False])
def test_a_step_on_qwen3_has_the_gradient_of_transformers(pack, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from engine.families import open_weights
    from sample import load_model

    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(Qwen3Config(vocab_size=257, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
                                             bos_token_id=None, eos_token_id=None))
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    reference.save_pretrained(tmp_path / "hf")
    found = made_up_records([30, 7, 19, 50, 3, 12])
    x = torch.zeros(6, 50, dtype=torch.int64)
    labels, seen = torch.full((6, 50), -100), torch.zeros(6, 50, dtype=torch.int64)
    for i, (ids, learn) in enumerate(found):
        x[i, :len(ids)], seen[i, :len(ids)] = torch.from_numpy(ids), 1
        labels[i, :len(ids)] = torch.where(torch.from_numpy(learn), torch.from_numpy(ids), -100)
    expected = reference(x, attention_mask=seen, labels=labels).loss  # the mean over labels
    expected.backward()
    ours = load_model(open_weights(str(tmp_path / "hf")), torch.device("cpu"))
    reader = RecordReader(TokenDataset(write_records(tmp_path / "set", train=found), "train"), 64, pack)
    n = reader.n_windows
    assert n < 6 if pack else n == 6
    batch, targets, documents = reader.batch(0, n)
    loss = ours(batch, targets, divisor=reader.labels(0, n), documents=documents)
    loss.backward()
    assert abs(loss - expected) < 1e-5
    for theirs, mine in zip(reference.model.layers, ours.blocks):
        for a, b in ((theirs.self_attn.q_proj, mine.attn.q), (theirs.self_attn.k_proj, mine.attn.k), (theirs.self_attn.v_proj, mine.attn.v),
                     (theirs.self_attn.o_proj, mine.attn.o), (theirs.mlp.gate_proj, mine.mlp.gate), (theirs.mlp.up_proj, mine.mlp.up),
                     (theirs.mlp.down_proj, mine.mlp.down), (theirs.self_attn.q_norm, mine.attn.q_norm), (theirs.input_layernorm, mine.norm1)):
            assert a.weight.grad.abs().max() > 1e-4 and (a.weight.grad - b.weight.grad).abs().max() < 1e-4
    assert (reference.model.embed_tokens.weight.grad - ours.wte.weight.grad[:257]).abs().max() < 1e-4


# ------------------------------------------------------------------------------------------------------------- one curve


def test_packed_sft_is_one_curve_on_any_number_of_processes_and_resumed_within_an_epoch(chats, data, tmp_path):
    settings = {**SFT, "max_iters": 8, "lr_decay_iters": 8, "deterministic": True, "dropout": 0.1, "eval_interval": 4, "replay_dataset": data,
                "replay_fraction": 0.2, "general_dataset": data}
    several(1, [(tmp_path / "one", chats, settings)])
    several(2, [(tmp_path / f"{layout}2", chats, {**settings, "parallel": layout, "max_iters": end}) for layout in ("ddp", "fsdp") for end in (3, 8)])
    several(4, [(tmp_path / f"{layout}4", chats, {**settings, "parallel": layout}) for layout in ("ddp", "fsdp")])
    one = curve(tmp_path / "one")
    assert len(one) == 8 and one[8][0] < one[1][0]
    for run in ("ddp2", "fsdp2", "ddp4", "fsdp4"):
        assert curve(tmp_path / run) == one and tensors(tmp_path / run, 8) == tensors(tmp_path / "one", 8), run
        theirs, mine = records(tmp_path / run, "val"), records(tmp_path / "one", "val")
        assert [v for v in theirs if v["step"] != 3] == mine and [v["step"] for v in mine] == [0, 4, 8] and mine[0]["general_loss"] > 0
    assert [r["step"] for r in records(tmp_path / "fsdp2", "event") if r["event"] == "resumed"] == [3]


def test_the_default_mode_agrees_to_rounding_and_goes_on_exactly(chats, tmp_path):
    settings = {**SFT, "max_iters": 8, "lr_decay_iters": 8}
    several(1, [(tmp_path / "one", chats, settings)])
    several(2, [(tmp_path / f"{layout}-{end}", chats, {**settings, "parallel": layout, "max_iters": n}) for layout in ("ddp", "fsdp")
                for end, n in (("whole", 8), ("parts", 3), ("parts", 8))])
    one = curve(tmp_path / "one")
    for layout in ("ddp", "fsdp"):
        whole = curve(tmp_path / f"{layout}-whole")
        assert whole == curve(tmp_path / f"{layout}-parts") and tensors(tmp_path / f"{layout}-whole", 8) == tensors(tmp_path / f"{layout}-parts", 8)
        for step in one:
            assert whole[step][:2] == pytest.approx(one[step][:2], rel=1e-5)


# --------------------------------------------------------------------------------------------- epochs, forgetting, what is told


def test_a_run_by_epochs_ends_where_they_do_and_says_what_it_cost(chats, data, tmp_path):
    settings = {**SFT, "num_epochs": 1.5, "pack": False, "eval_interval": 20, "general_dataset": data}
    base = {k: v for k, v in TINY.items() if k != "max_iters"}

    def start(*more):
        return forked(1, "train.py", "tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", f"--dataset={chats}", *as_args({**base, **settings}), *more)

    result = start()
    assert result.code == 0, result.err
    assert steps(tmp_path / "run")[-1] == 38  # 1.5 * 200 records over 8 an update
    val = records(tmp_path / "run", "val")
    assert [v["step"] for v in val] == [0, 20, 38]
    rise = val[-1]["general_loss"] - val[0]["general_loss"]
    told = f"general loss {'rose' if rise > 0 else 'fell'} by {abs(rise):.4f}, from {val[0]['general_loss']:.4f} to {val[-1]['general_loss']:.4f}"
    assert told in result.out and "200 records in 200 rows" in result.out
    assert f"step 0: validation loss {val[0]['loss']:.4f}" in result.out and f"on general text {val[0]['general_loss']:.4f}" in result.out
    # a loss is one of a label: at first that of a guess among 257, in training, validation and general text
    assert all(abs(loss - math.log(257)) < 0.15 for loss in (curve(tmp_path / "run")[1][0], val[0]["loss"], val[0]["general_loss"]))
    assert val[-1]["loss"] < val[0]["loss"] - 0.5
    more = start("--num_epochs=1.6")  # goes on, and the end still knows where it all began
    val = records(tmp_path / "run", "val")
    assert more.code == 0 and [v["step"] for v in val] == [0, 20, 38, 40] and f"from {val[0]['general_loss']:.4f} to {val[-1]['general_loss']:.4f}" in more.out
    changed = start("--pack=True", "--num_epochs=2")
    assert changed.code == 2 and len(changed.errors) == 1 and "pack was False" in changed.errors[0]


@pytest.mark.quick
def test_both_losses_are_drawn(tmp_path):
    from engine.metrics import Metrics

    metrics = Metrics(str(tmp_path), 0)
    metrics.write("val", 0, loss=3.0, general_loss=1.0)
    assert metrics.best() == (None, float("inf")) and metrics.what_it_brought() == []
    for step in (1, 2):
        metrics.write("train", step, loss=3.0 - step, grad_norm=1.0, lr=1.0, tokens=step * 10, tokens_per_s=1.0)
        metrics.write("val", step, loss=3.0 - step, general_loss=1.0 + step / 4)
    metrics.draw()
    assert os.path.getsize(tmp_path / "loss.png") > 10_000
    assert metrics.best() == (2, 1.0) and metrics.what_it_brought() == ["general loss rose by 0.5000, from 1.0000 to 1.5000"]
    metrics.close()
    again = Metrics(str(tmp_path), 1)
    assert again.general == [(0, 1.0), (10, 1.25)] and again.what_it_brought() == ["general loss rose by 0.2500, from 1.0000 to 1.2500"]


# ------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.quick
@pytest.mark.parametrize("words, told", [
    (["--task=sft", "--num_epochs=3", "--max_iters=10"], "max_iters=10 and num_epochs=3 both say how long"),
    (["--num_epochs=0"], "num_epochs=0: expected a number above 0"), (["--task=sfd"], "did you mean sft"),
    (["--task=sft", "--replay_fraction=0.1"], "takes both"), (["--task=sft", "--replay_dataset=stdlib"], "takes both"),
    (["--task=sft", "--replay_fraction=1", "--replay_dataset=stdlib"], "up to, but not, 1"), (["--pack=False"], "give --task=sft"),
    (["--train_on=last"], "give --task=sft"), (["--task=sft", "--train_on=first"], "all, last")])
def test_settings_that_contradict_each_other_are_one_sentence(words, told):
    with pytest.raises(UserError) as error:
        load_config(["tests/empty_config.py", *words], None)
    assert len(error.value.sentences) == 1 and told in error.value.sentences[0]


@pytest.mark.quick
def test_what_was_typed_says_how_long_to_train(tmp_path):
    (tmp_path / "rung.py").write_text("max_iters = 5\nnum_epochs = 2.0\n")
    assert load_config([str(tmp_path / "rung.py")], None).num_epochs == 2
    c = load_config([str(tmp_path / "rung.py"), "--max_iters=7"], None)
    assert c.num_epochs is None and c.max_iters == 7
    assert load_config(["tests/empty_config.py", "--model", "Qwen/Qwen3-0.6B"], None).init_from == "Qwen/Qwen3-0.6B"


@pytest.mark.quick
def test_data_that_the_task_cannot_train_on_are_one_sentence(chats, data, tmp_path):
    def opened(folder, **settings):
        c = Config(out_dir="out", device="cpu", batch_size=2, total_batch_size=64, **{"task": "sft", "block_size": 32, **settings})
        c.given = dict.fromkeys(settings, "command line")
        check_task(c)
        return read_folders(c, None, {"dataset": folder, "general_dataset": c.general_dataset, "replay_dataset": c.replay_dataset}, lambda sentence: None), c

    feed, c = opened(chats, num_epochs=2.0)
    assert c.max_iters == -(-2 * feed.train.n_windows // 2) and c.vocab_size == 257 and feed.tokenizer.name == "byte"
    none = write_records(tmp_path / "none", train=[(range(9), [False] * 9)] * 3, val=[(range(9), [True] * 9)])
    late = write_records(tmp_path / "late", train=[(range(30), [True] * 30)], val=[(range(30), [False] * 30)] * 3 + [(range(30), [True] * 30)])
    for folder, settings, told in (
            (none, {}, "no token with a label"), (late, dict(eval_tokens=32), "eval_tokens=32"), (data, {}, "--task=pretrain"),
            (chats, dict(task="pretrain"), "--task=sft"), (chats, dict(block_size=16), "block_size=16 takes 17"),
            (chats, dict(train_on="last"), "prepared with train_on=all"), (chats, dict(general_dataset=chats), "expected a data set of text"),
            (chats, dict(vocab_size=100), "vocabulary ends at 99")):
        with pytest.raises(UserError) as error:
            opened(folder, **settings)
        assert told in str(error.value), folder


def test_a_file_of_records_is_prepared_with_the_tokenizer_of_the_weights_and_found_again(data, tmp_path):
    name = f"talks{uuid.uuid4().hex[:8]}"
    lines = [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(60)]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train(tmp_path / "base", data, max_iters=2, block_size=64)
    words = ["tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", f"--dataset={tmp_path / name}.jsonl", f"--model={tmp_path / 'base'}", "--init_optimizer=False",
             *as_args({**TINY, "task": "sft", "block_size": 64, "total_batch_size": 4 * 128, "eval_interval": 2, "general_dataset": data, "lr_decay_iters": 4})]
    try:
        first = forked(2, "train.py", *words, "--max_iters=2")
        assert first.code == 0, first.err
        more = forked(1, "train.py", *words, "--max_iters=4")
        assert more.code == 0, more.err
        assert first.out.count("are new to") == 1 and "rows 257 to 258 of the vocabulary" in first.out and "are new to" not in more.out
        for result in (first, more):
            assert result.out.count("records: 60 (question/answer 60)") == 1
        with open(tmp_path / "run" / "report.json") as f:
            assert json.load(f)["records"] == 60
        assert list(curve(tmp_path / "run")) == [1, 2, 3, 4]
        made = glob.glob(os.path.join(ROOT, "data", f"{name}-*"))
        assert len(made) == 1, "the run that went on prepared it anew"
        other = forked(1, "train.py", *words, "--max_iters=5", "--train_on=last")
        assert other.code == 2 and len(other.errors) == 1 and "train_on was all" in other.errors[0]
        frozen = forked(1, "train.py", *words, "--lora_rank=2", f"--out_dir={tmp_path / 'frozen'}")
        assert frozen.code == 2 and len(frozen.errors) == 1 and "has no control tokens for a chat" in frozen.errors[0]
    finally:
        for folder in glob.glob(os.path.join(ROOT, "data", f"{name}-*")):
            shutil.rmtree(folder)


def test_records_that_nothing_says_how_to_prepare_stop_before_step_0(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    result = train(tmp_path / "run", tmp_path / "mine.jsonl", expect=2, **SFT)
    assert len(result.errors) == 1 and "--init_from" in result.errors[0] and "prepare.py" in result.errors[0] and not (tmp_path / "run").exists()


# ----------------------------------------------------------------------------------------------------- plans and rehearsals


@pytest.mark.quick
def test_a_plan_knows_how_long_the_epochs_of_prepared_records_take(chats, capsys):
    from engine.plan import print_plan

    words = [f"--{k}={v}" for k, v in {**TINY, **SFT, "plan": 2}.items() if k != "max_iters"]
    rows = RecordReader(TokenDataset(chats, "train"), 32).n_windows
    for dataset, told in ((chats, f"x {-(-2 * rows // 8)} updates"), ("nowhere.jsonl", "x 1,000 updates = 256k (assumed: num_epochs=2 follows from the data")):
        c = load_config(["tests/empty_config.py", *words, "--num_epochs=2", f"--dataset={dataset}"], None)
        print_plan(c, print)
        assert told in capsys.readouterr().out


@pytest.mark.full  # the rungs themselves are rehearsed by test_plan.py
@pytest.mark.parametrize("n", [1, 2])
def test_a_rung_of_sft_rehearses_with_records_and_a_process_killed(n, tmp_path):
    (tmp_path / "rung.py").write_text("task = 'sft'\ninit_from = 'Qwen/Qwen3-0.6B'\ndataset = 'my_data.json'\nnum_epochs = 3.0\nreplay_dataset = 'x'\nreplay_fraction = 0.1\n"
                                      "general_dataset = 'stdlib'\nnorm = 'rmsnorm'\npos = 'rope'\nmlp = 'swiglu'\ndropout = 0.1\n"
                                      + ("parallel = 'fsdp'\ndeterministic = True\n" if n == 2 else ""))
    result = run_script("train.py", tmp_path / "rung.py", "--rehearse", cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert result.code == 0 and "all is well" in result.out, result.out + result.err


@pytest.mark.quick
@pytest.mark.parametrize("pack", [True, False])
def test_an_answer_is_right_where_greedy_decoding_gives_it_to_its_last_token(pack, tmp_path):
    """Records whose answers are what generate() makes of their questions, some with one token changed."""
    from engine.evaluate import evaluate
    from engine.processes import Place, Precision
    from engine.watch import Watch
    from model import generate
    from test_model import build, noisy

    model, rng, found, expected = noisy(build(pos="rope", bias=False)), np.random.default_rng(0), [], 0
    for _ in range(24):
        question = rng.integers(0, 257, rng.integers(1, 12))
        answers, ids = rng.integers(1, 3), question
        learn = [False] * len(question)
        for _ in range(answers):  # some records have two
            answer = [token.item() for token in generate(model, torch.tensor(ids)[None], int(rng.integers(1, 6)), temperature=0.0)]
            if rng.random() < 0.4:
                at = rng.integers(len(answer))
                answer[at] = (answer[at] + 1) % 257
            else:
                expected += 1
            ids, learn = np.append(ids, answer), learn + [True] * len(answer)
            ids, learn = np.append(ids, rng.integers(0, 257)), [*learn, False]  # what the template puts behind it
        found.append((ids, np.array(learn)))
    folder = write_records(tmp_path, train=found[:1], val=found)
    reader = RecordReader(TokenDataset(folder, "val"), 32, pack)
    place = Place(device=torch.device("cpu"))
    with Watch(place) as watch:
        watch.start(Config(watchdog_seconds=0), 0)
        result = evaluate(model, reader, 10**6, 2, place, Precision("float32", None, False), watch, answers=True)
    count = sum(int((np.diff(learn.astype(int), prepend=0) == 1).sum()) for _, learn in found)
    assert result["accuracy"] == pytest.approx(expected / count) and 0.2 < result["accuracy"] < 0.9
