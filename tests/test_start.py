"""What a start does not wait for: modules of seconds that its first update, first token or first document does not use."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT, TINY, as_args

SLOW = ("torch._dynamo", "torch._inductor", "sympy", "matplotlib", "wandb", "tensorboard", "datasets", "transformers", "tokenizers", "tiktoken", "huggingface_hub",
        "pandas", "pyarrow", "jinja2")


def imported(module, *args, cwd=ROOT):
    """Which of the slow modules, and torch, are there when a script of ours has done its work in a process of its own."""
    code = (f"import sys, {module}\nsys.argv = ['{module}.py', *{[*map(str, args)]!r}]\n"
            f"{module}.main(*[sys.argv[1:]] * {module}.main.__code__.co_argcount)\n"
            f"print('\\nimported:', *[name for name in {(*SLOW, 'torch')!r} if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.quick
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_neither_the_first_update_nor_the_first_token_waits_for_what_it_does_not_use(data, tmp_path, optimizer):
    run = tmp_path / "run"
    settings = {**TINY, "max_iters": 1, "lr_decay_iters": 9, "optimizer": optimizer, "dropout": 0.1, "dataset": data, "out_dir": run}
    assert imported("train", "tests/empty_config.py", *as_args(settings)) == ["torch"]
    assert imported("sample", f"--out_dir={run}", "--start=a", "--max_new_tokens=1", "--device=cpu", "--threads=1") == ["torch"]


@pytest.mark.quick
def test_records_are_learnt_without_it_too(tmp_path):
    from conftest import made_up_records, write_records

    records = write_records(tmp_path / "set", train=made_up_records([9, 12, 7, 15]), val=made_up_records([9]))
    settings = {**TINY, "max_iters": 1, "task": "sft", "dataset": records, "out_dir": tmp_path / "run", "warmup_iters": 0}
    assert "torch._dynamo" not in imported("train", "tests/empty_config.py", *as_args(settings))


@pytest.mark.quick
def test_preparing_text_by_bytes_imports_next_to_nothing(tmp_path):
    (tmp_path / "t.txt").write_text("a word\n" * 1000)
    assert imported("prepare", "t.txt", "--tokenizer=byte", "--out=t", cwd=tmp_path) == []
