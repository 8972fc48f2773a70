"""Every command in README.md and configs/README.md works (at toy size, in a copy of the repository), and every message quoted is one of ours."""

import ast
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ASSETS, ROOT, some_text
from test_train import nanogpt_checkpoint

DOCUMENTS = ("configs/README.md", "README.md")

# What is not run here, and why
DOWNLOADS = "downloads; tests/test_families.py and tests/test_prepare.py read the same from a cache"
MEASURES = "measures for minutes"
NOT_RUN = {
    "pip install -r requirements.txt": "installs; .ci/run does it in a fresh environment",
    "pip install -r requirements.txt -r tests/requirements.txt": "installs; .ci/run does it in a fresh environment",
    "pip install lm_eval[hf]==0.4.13": "installs a program that this project does not need",
    "lm_eval --model hf --model_args pretrained=out/quickstart_hf --tasks hellaswag --device cpu --batch_size 4": "another program, which downloads its task",
    "python -m pytest": "runs this",
    "python prepare.py fineweb10B": DOWNLOADS,
    "python sample.py --init_from=HuggingFaceTB/SmolLM2-135M": DOWNLOADS,
    "python train.py configs/gpt2_124m.py --init_from=gpt2 --dataset=mine --learning_rate=3e-5 --out_dir=out/tuned": DOWNLOADS,
    "torchrun --nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv_backend=c10d --rdzv_id=gpt2 --rdzv_endpoint=10.0.0.1:29400 "
    "train.py configs/gpt2_124m_2node.py --check": "needs two machines; tests/test_two_machines.py makes them",
    "python train.py configs/qwen3_sft.py --model Qwen/Qwen3-0.6B --dataset my_data.json": DOWNLOADS,
    "sbatch configs/launch/slurm.sbatch": "needs Slurm",
    "wandb login": "needs an account", "wandb sync": "needs an account",
    "python -m tests.bench --peer PATH_TO_NANOGPT --text input.txt": MEASURES, "python -m tests.bench.scaling": MEASURES, "python -m tests.bench.saving": MEASURES,
    "python -m tests.bench.generate --peer=PATH_TO_NANOGPT --repeats=1": MEASURES, "python -m tests.bench.generate": MEASURES,
    "python -m tests.bench.prepare": MEASURES, "pip install torchao==0.18.0": "installs; float8 needs a GPU",
}

# Exit codes that are not 0, and words that have to be in what is printed
CODES = {
    "timeout -s KILL 20 python train.py --max_iters=40 --save_interval=10 --out_dir=out/killed": (0, -9),
    "python -m engine.metrics out/one out/fast --out=out/fast.png": (0, 1),
    "python -m engine.metrics out/quickstart out/longer": (0, 1),
    "python train.py --optimizer=adamw --learning_rate=3 --grad_clip=0 --warmup_iters=0 --max_iters=40 --out_dir=out/wrong": (0, 1),
}
SAYS = {
    "python -m engine.metrics out/whole out/killed": "are identical: updates 1 to 40",
    "python -m engine.metrics out/one out/two": "are identical: updates 1 to 40",
    "python -m engine.metrics out/one out/shards": "are identical: updates 1 to 40",
    "python train.py configs/llama_8b_hsdp.py --rehearse": "all is well",
    "python train.py --profile=5 --max_iters=20 --out_dir=out/profiled": "the 10 most expensive of",
    "torchrun --standalone --nproc_per_node=2 train.py --batch_size=4 --cp=2 --comm_report=5 --max_iters=20 --out_dir=out/sent": "keys and values",
    "python train.py configs/gpt2_124m.py --hellaswag=hellaswag_val.jsonl": "HellaSwag",
}

TOY = ("--n_layer=2 --n_head=2 --n_embd=32 --block_size=128 --gradient_accumulation_steps=4 --eval_interval=20 --eval_tokens=64 --sample_tokens=8 --device=cpu "
       "--dtype=float32 --compile=false --threads=1").split()


def commands():
    """The commands of the documents, each once, in order, as lists of words: all lines of code blocks that name no language, and inline code
    that begins as a command."""
    found = {}
    for document in DOCUMENTS:
        with open(os.path.join(ROOT, document), encoding="utf-8") as f:
            text = f.read()
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            for line in () if language else block.replace("\\\n", " ").splitlines():
                for part in line.split(" && "):
                    if words := shlex.split(part, comments=True):
                        found[" ".join(words)] = words
        for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
            if re.match(r"(python|torchrun|pip|sbatch|srun|kubectl|timeout|lm_eval|wandb|tensorboard) ", code):
                found[" ".join(code.split())] = shlex.split(code)
    return found


@pytest.mark.quick
def test_every_command_is_run_or_has_a_reason():
    found = commands()
    assert len(found) > 40
    for command, words in found.items():
        ours = words[0] in ("python", "torchrun", "timeout") and not any(w.startswith("tests.bench") for w in words)
        assert ours or command in NOT_RUN, f"{command}: teach tests/test_docs.py to run it, or say why not"
    assert not (set(NOT_RUN) | set(CODES) | set(SAYS)) - set(found), "these stand in no document any more"


def toy(words, python):
    """The words of a command as they are run here: the same scripts with a small model."""
    words = [{"FOLDER_OR_NAME": "out/quickstart_hf", "CONFIG": "configs/gpt2_124m.py"}.get(w, w) for w in words]
    words = [w.replace("FOLDER_OR_NAME", "out/quickstart_hf").replace("nproc_per_node=8", "nproc_per_node=2") for w in words]
    if "train.py" in words and not {"--rehearse", "--check", "--help"} & set(words) and not any(w.startswith("--plan") for w in words):
        short = any(re.fullmatch(r"--max_iters=[1-4]?\d", w) for w in words)
        words = [w for w in words if not w.startswith("--total_batch_size")] + TOY + ([] if short else ["--max_iters=6"])
    if words[:2] == ["python", "prepare.py"] and "shakespeare_char" in words:
        words += ["--file", "shakespeare.txt"]
    if words[:2] == ["python", "prepare.py"] and not os.path.isdir(ASSETS):
        words = [w.replace("--tokenizer=gpt2", "--tokenizer=byte") for w in words]  # its vocabulary would have to be downloaded
    if "sample.py" in words and not any(w.startswith("--export") for w in words):
        words += ["--max_new_tokens=16", "--device=cpu"]
    if "--rehearse" in words or "--check" in words:
        words += ["--device=cpu"]
    starts = {"python": [python], "torchrun": [python, "-m", "torch.distributed.run"]}
    return [w for word in words for w in starts.get(word, [word])]


@pytest.fixture
def repository(tmp_path):
    """A copy of what git would commit, with small data sets where the rungs look for them."""
    from prepare import prepare

    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    copy = tmp_path / "boringGPT"
    for name in files.splitlines():
        os.makedirs(os.path.dirname(copy / name), exist_ok=True)
        shutil.copy(os.path.join(ROOT, name), copy / name)
    (copy / "my_texts").mkdir()
    (copy / "my_texts" / "a.txt").write_text(some_text(30_000))
    (copy / "shakespeare.txt").write_text(some_text(30_000))
    (copy / "my_data.json").write_text(json.dumps([{"question": f"What is {a}?", "answer": str(a)} for a in range(40)]))
    (copy / "questions.jsonl").write_text('{"prompt": "def"}\n{"messages": [{"role": "user", "content": "class"}]}\n')
    (copy / "hellaswag_val.jsonl").write_text('{"ctx": "def return", "endings": ["if", "else", "for", "in"], "label": 2}\n' * 3)
    for name in ("stdlib", "fineweb10B"):
        prepare(str(copy / "shakespeare.txt"), tokenizer="byte", val_fraction=0.1, workers=1, out=str(copy / "data" / name), quiet=True)
    theirs = tmp_path / "nanoGPT"
    for folder in ("config", "out", "data/chars"):
        (theirs / folder).mkdir(parents=True)
    (theirs / "config" / "train_shakespeare_char.py").write_text("out_dir = 'out-shakespeare-char'\ndataset = 'shakespeare_char'\nbatch_size = 64\n")
    nanogpt_checkpoint(theirs / "out" / "ckpt.pt", "", vocab=50257)
    return copy


@pytest.mark.full
def test_every_command_works(repository):
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTHONPATH")} | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    if os.path.isdir(ASSETS):
        environment["TIKTOKEN_CACHE_DIR"] = os.path.join(ASSETS, "tiktoken")
    failed = []
    for command, words in commands().items():
        if command in NOT_RUN:
            continue
        done = subprocess.run(toy(words, sys.executable), cwd=repository, env=environment, input="def\n/exit\n", capture_output=True, text=True, timeout=600)
        print(f"$ {command}\n{done.stdout[-1500:]}{done.stderr[-1500:]}", flush=True)
        if done.returncode not in CODES.get(command, (0,)) or SAYS.get(command, "") not in done.stdout:
            failed.append(f"{command}\nended with {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.quick
def test_the_messages_of_the_troubles_are_those_of_the_code():
    """`…` in the table stands for what is filled in; the rest is to be found in a text of the source."""
    texts = []
    for path in [os.path.join(ROOT, "train.py"), *glob.glob(os.path.join(ROOT, "engine", "*.py")), *glob.glob(os.path.join(ROOT, "data", "*.py"))]:
        with open(path, encoding="utf-8") as f:
            for node in ast.walk(ast.parse(f.read())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    with open(os.path.join(ROOT, "configs", "README.md"), encoding="utf-8") as f:
        table = f.read().split("## Troubles")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    messages = [m for row in rows for m in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 14
    for message in messages:
        if not message.startswith("torch."):
            for part in filter(str.strip, message.split("…")):
                assert any(part.strip(" ()") in text for text in texts), f"{part!r} of {message!r} is said nowhere"
