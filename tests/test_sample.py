"""sample.py: prompts of every kind, one sentence for what cannot be sampled."""

import os

import pytest

from conftest import ROOT, forked, run_script, train
from prepare import prepare


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("sample") / "run"
    train(run, data, max_iters=15)
    return run


@pytest.fixture(scope="module")
def chars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chars")
    (folder / "t.txt").write_text("abc abd\nabe é\n" * 200, encoding="utf-8")
    data = prepare(str(folder / "t.txt"), tokenizer="char", val_fraction=0.2, workers=1, out=str(folder / "set"), quiet=True)
    train(folder / "run", data, max_iters=3)
    return folder / "run"


def sample(run, *args, code=0, env=None):
    words = ["sample.py", f"--out_dir={run}", "--device=cpu", "--threads=1", *args]
    result = run_script(*words, env=env) if env else forked(1, *words)
    assert result.code == code, result.out + result.err
    return result


def test_the_same_seed_is_the_same_text_and_the_prompt_comes_first(run):
    a, b = (sample(run, "--start=import ", "--max_new_tokens=50", "--seed=3").out for _ in range(2))
    assert a == b and a.startswith("import ") and len(a.encode(errors="replace")) >= 50
    several = sample(run, "--start=import ", "--max_new_tokens=50", "--seed=3", "--num_samples=3").out
    assert several.startswith(a.rstrip("\n")) and several.count("---------------\nimport ") == 2


def test_a_prompt_from_a_file_is_utf8_whatever_the_locale(run, tmp_path):
    (tmp_path / "p.txt").write_text("héllo ✓", encoding="utf-8")
    for env in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}, {}):
        assert sample(run, f"--start=FILE:{tmp_path / 'p.txt'}", "--max_new_tokens=3", env=env).out.startswith("héllo ✓")
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    for path, word in (("bad.txt", "UTF-8"), ("none.txt", "none.txt")):
        result = sample(run, f"--start=FILE:{tmp_path / path}", code=2)
        assert len(result.errors) == 1 and word in result.errors[0]


def test_an_empty_prompt_starts_from_end_of_text(run, chars):
    assert sample(run, "--start=", "--max_new_tokens=20").out.strip()
    assert len(sample(chars, "--start=", "--max_new_tokens=20").out) >= 20  # no end-of-text there: from a line's start


def test_prompts_and_texts_longer_than_the_context_work(run):
    long = "def f(x): return x " * 10
    assert sample(run, f"--start={long}", "--max_new_tokens=40").out.startswith(long)


def test_top_k_beyond_the_vocabulary_is_all_of_it(run):
    texts = [sample(run, f"--top_k={k}", "--max_new_tokens=30", "--start=a").out for k in (257, 10_000, "none")]
    assert texts[0] == texts[1] == texts[2]
    assert sample(run, "--top_k=1", "--max_new_tokens=30", "--start=a").out == sample(run, "--temperature=0", "--max_new_tokens=30", "--start=a").out


@pytest.mark.parametrize("args, words", [
    (["--top_k=0"], ["top_k=0", "at least 1"]), (["--top_k=-5"], ["top_k=-5"]), (["--top_p=0"], ["top_p"]), (["--temperature=-1"], ["temperature"]),
    (["--num_samples=0"], ["num_samples"]), (["--temprature=1"], ["did you mean temperature?"]), (["--max_new_tokens=many"], ["an integer"]),
    (["--init_from=nothing/here/at/all"], ["nothing/here/at/all"])])
def test_what_cannot_be_sampled_is_one_sentence(run, args, words):
    result = sample(run, *args, code=2)
    assert len(result.errors) == 1 and all(w in result.errors[0] for w in words) and not result.out, result.err


def test_a_character_the_model_never_saw_is_named(chars):
    result = sample(chars, "--start=abz", code=2)
    assert len(result.errors) == 1 and "z" in result.errors[0] and not result.out


def test_no_run_is_one_sentence_with_what_to_do(tmp_path):
    result = run_script("sample.py", f"--out_dir={tmp_path / 'none'}")
    assert result.code == 2 and len(result.errors) == 1 and "python train.py" in result.errors[0]


def test_weights_that_are_not_finite_are_said_to_be(run, tmp_path):
    import json
    import shutil

    import torch
    from safetensors.torch import load_file

    from engine import checkpoint as ckpt
    broken = shutil.copytree(run / "checkpoints" / "step_00000015", tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    manifest = json.loads((broken / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = ckpt.write_safetensors(broken / "model.safetensors", {n: torch.tensor(t.numpy()) for n, t in tensors.items()})
    manifest.pop("sha256")
    (broken / "manifest.json").write_text(json.dumps({**manifest, "sha256": ckpt.json_checksum(manifest)}))
    result = forked(1, "sample.py", f"--init_from={broken}", "--device=cpu")
    assert result.code == 1 and "not finite" in result.err and "Traceback" not in result.err


def test_a_reader_that_leaves_early_sees_no_traceback(run):
    import subprocess
    import sys

    done = subprocess.run(f"{sys.executable} sample.py --out_dir={run} --max_new_tokens=300 --num_samples=4 | head -c 5", shell=True, cwd=ROOT,
                          capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert done.stdout and not done.stderr


def test_texts_that_end_do_not_wait_aloud(run):
    out = sample(run, "--stop", "--num_samples=6", "--max_new_tokens=400", "--temperature=3", "--top_k=none", "--start=a").out
    assert all(part.count("<|endoftext|>") <= 1 for part in out.split("---------------\n"))


def test_a_tokenizer_of_another_size_is_told(chars):
    result = sample(chars, "--tokenizer=byte", "--start=z", code=2)
    assert len(result.errors) == 1 and "vocabulary ends at" in result.errors[0]


# ------------------------------------------------------------------------------------------------------- files of prompts

PROMPTS = ["def f(x):", "a", "import os, sys, numpy as", "x = ", "class Value: name", "return 1", "for i in range(10): print(i)", "é", "if"]


def answers(text):
    import json

    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("how", [["--temperature=0"], ["--temperature=1", "--seed=5"], ["--top_p=0.9", "--stop"]])
def test_answers_to_a_file_of_prompts_are_those_made_one_by_one(run, tmp_path, how):
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    batched = answers(sample(run, f"--prompts={tmp_path / 'p.txt'}", "--max_new_tokens=12", "--batch_size=4", *how).out)
    assert [a["prompt"] for a in batched] == PROMPTS
    for prompt, found in list(zip(PROMPTS, batched))[::3]:
        alone = sample(run, f"--start={prompt}", "--max_new_tokens=12", *how).out
        ending = "<|endoftext|>" if found["ended"] else ""
        assert alone == prompt + found["answer"] + ending + "\n" and found["tokens"] <= 12


def test_a_jsonl_of_prompts_keeps_its_records_and_goes_to_a_file(run, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": 7, "prompt": "a"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": ""}\n')
    result = sample(run, f"--prompts={tmp_path / 'p.jsonl'}", f"--out={tmp_path / 'a.jsonl'}", "--num_samples=2", "--max_new_tokens=5")
    found = answers((tmp_path / "a.jsonl").read_text(encoding="utf-8"))
    assert not result.out and [(a.get("id"), a["sample"]) for a in found] == [(7, 0), (7, 1), (None, 0), (None, 1), (None, 0), (None, 1)]
    assert found[2]["messages"][0]["content"] == "hi" and found[0]["answer"] != found[1]["answer"]
    sample(run, f"--prompts={tmp_path / 'p.jsonl'}", f"--out={tmp_path / 'none' / 'a.jsonl'}", code=2)


@pytest.mark.parametrize("name, content, words", [
    ("none.txt", None, ["none.txt", "No such file"]), ("empty.txt", b"\n\n", ["holds no prompts"]), ("bad.txt", b"abc\xff", ["UTF-8"]),
    ("broken.jsonl", b'{"prompt": "a"}\n{"prompt": \n', ["broken.jsonl line 2", "not JSON"]), ("list.jsonl", b"[1]\n", ["list.jsonl line 1", "prompt"]),
    ("both.jsonl", b'{"prompt": "a", "messages": []}', ["line 1", "either"]), ("number.jsonl", b'{"prompt": 5}', ["line 1", "to be text"]),
    ("talk.jsonl", b'{"prompt": "a"}\n{"messages": [{"role": "user"}]}', ["talk.jsonl line 2", "message 1"])])
def test_prompts_that_cannot_be_read_are_one_sentence(run, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = sample(run, f"--prompts={tmp_path / name}", code=2)
    assert len(result.errors) == 1 and all(w in result.errors[0] for w in words) and not result.out, result.err


def test_one_way_to_sample_at_a_time(run):
    for args in (["--chat", "--start=a"], ["--prompts=a.txt", "--chat"], ["--out=a.jsonl"], ["--system=a"]):
        assert len(sample(run, *args, code=2).errors) == 1
