"""Settings: nanoGPT's names mean what they mean there, and what cannot be meant is one sentence."""

import pytest

from engine.config import FIELDS, NOT_OF_A_RUN, Config, load_config, resolve, table
from engine.errors import UserError
from engine.processes import Place, choose_device, choose_precision, start

pytestmark = pytest.mark.quick


@pytest.fixture
def load(tmp_path):
    def load(*argv, text="batch_size = 4\nblock_size = 8\n"):
        (tmp_path / "rung.py").write_text(text)
        config = load_config([str(tmp_path / "rung.py"), *argv], None)
        resolve(config)
        return config
    return load


def refused(load, *argv, **k):
    with pytest.raises(UserError) as error:
        load(*argv, **k)
    return error.value.sentences


def test_both_forms_of_the_command_line_and_the_last_of_a_key_counts(load):
    c = load("--learning_rate", "1e-4", "--max_iters=7", "--max_iters", "9", "--compile", "--bias=1", "--qk_norm=True", "--wandb_project=a=b=c")
    assert (c.learning_rate, c.max_iters, c.compile, c.bias, c.qk_norm, c.wandb_project) == (1e-4, 9, True, True, True, "a=b=c")
    assert load("--seed=5", "--compile", "false").compile is False and load("--vocab_size=none").vocab_size is None


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_a_number_is_a_number(load, text):
    assert load(f"--learning_rate={text}").learning_rate == 1e-4
    assert load(text=f"learning_rate = {text}\n").learning_rate == 1e-4


def test_one_is_accepted_for_a_float_and_a_bool(load):
    c = load("--learning_rate=1", "--grad_clip=0", "--bias=0")
    assert type(c.learning_rate) is float and c.grad_clip == 0.0 and c.bias is False
    assert load(text="learning_rate = 1\nbias = 1\n").bias is True


@pytest.mark.parametrize("argument, words", [
    ("--lerning_rate=1", ["lerning_rate", "did you mean learning_rate?"]), ("--lr=1e-4", ["did you mean learning_rate?"]),
    ("--max_iters=1e4", ["max_iters='1e4'", "an integer"]), ("--max_iters=2.5", ["an integer"]), ("--learning_rate=fast", ["a number"]),
    ("--compile=maybe", ["true or false"]), ("--learning_rate=nan", ["not finite"]), ("--learning_rate", ["has no value"]),
    ("--lr_schedule=cosin", ["cosine, wsd, linear, constant", "did you mean cosine?"]), ("--batch_size=0", ["at least 1"]),
    ("--keep_last=0", ["-1 for all"]), ("--keep_last=-2", ["-1 for all"]), ("--beta2=1", ["beta2=1.0"]), ("--dtype=fp8", ["bfloat16"]),
    ("--total_batch_size=100", ["batch_size * block_size = 4 * 8 = 32", "96 or 128 would work"]),
    ("--total_batch_size=10", ["total_batch_size=32 would work"]), ("--decay_fraction=0", ["decay_fraction"]), ("--seed=-1", ["seed"]),
    ("--activation_checkpointing=selectiv", ["none, selective, block", "did you mean selective?"]), ("--activation_budget=0", ["GB above 0"])])
def test_a_mistake_on_the_command_line_is_one_sentence(load, argument, words):
    sentences = refused(load, argument)
    assert len(sentences) == 1 and all(w in sentences[0] for w in words), sentences


@pytest.mark.parametrize("text, words", [
    ("n_layers = 3", ["rung.py", "n_layers", "did you mean n_layer?"]), ("max_iters = '10'", ["rung.py", "is a str", "an integer"]),
    ("max_iters = 1e3", ["is a float"]), ("batch_size = True", ["is a bool"]), ("dataset = 3", ["a text"]), ("compile = 'yes'", ["true or false"]),
    ("learning_rate = float('inf')", ["not finite"]), ("max_iters = 10 +", ["line 1", "not Python"]), ("from configs.nowhere import *", ["running it failed"]),
    ("1 / 0", ["ZeroDivisionError"])])
def test_a_mistake_in_a_config_file_is_one_sentence_with_the_file(load, text, words):
    sentences = refused(load, text=text)
    assert len(sentences) == 1 and all(w in sentences[0] for w in words), sentences


def test_a_budget_of_activations_chooses_alone(load):
    assert "leave one of the two out" in refused(load, "--activation_budget=3", "--activation_checkpointing=block")[0]
    assert load("--activation_budget=3", "--activation_checkpointing=none").activation_budget == 3


def test_several_mistakes_are_told_at_once(load):
    assert len(refused(load, "--lerning_rate=1", "--max_iters=x", "--compile=2")) == 3
    assert len(refused(load, text="n_layers = 1\nmax_iters = 'x'\n")) == 2


def test_a_config_file_that_is_not_there_is_told_with_the_nearest_rung():
    with pytest.raises(UserError, match="did you mean quickstart?"):
        load_config(["configs/quikstart.py"], None)
    assert load_config(["quickstart"], None).out_dir == "out/quickstart"
    with pytest.raises(UserError, match="did you mean --max_iters=10?"):
        load_config(["max_iters=10"], None)


def test_a_rung_may_start_from_another_and_have_helpers_of_its_own(load):
    c = load("--n_layer=2", text="import time\nfrom configs.quickstart import *\n_k = 3\ndef helper(): return 1\nn_layer = _k\nwandb_run_name = str(time.time())\n")
    assert c.n_layer == 2 and c.dataset == "stdlib"


def test_micro_batches_are_counted_over_all_processes_either_way(load):
    assert load("--total_batch_size=256").micro_batches == 8 and load("--gradient_accumulation_steps=8").total_batch_size == 256
    assert load().micro_batches == 40  # nanoGPT's default
    assert load("--total_batch_size=256", "--gradient_accumulation_steps=8").micro_batches == 8
    assert "batch_size=2 or 4 or 8 or 16 (the same tokens an update) or total_batch_size=96 or 192 would work" in refused(load, "--total_batch_size=128", "--batch_size=12")[0]
    assert "contradict" in refused(load, "--total_batch_size=256", "--gradient_accumulation_steps=4")[0]
    # what is typed wins over what the file says the other way
    both = "batch_size = 4\nblock_size = 8\ntotal_batch_size = 256\n"
    assert load("--gradient_accumulation_steps=2", text=both).total_batch_size == 64


NANOGPT = """
import time
out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
init_from = 'gpt2-xl'
always_save_checkpoint = False
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
device = 'cuda'
backend = 'nccl'
compile = True
dtype = 'bfloat16'
"""


def test_nanogpts_names_keep_their_meaning(load):
    c = load(text=NANOGPT)
    assert (c.out_dir, c.dataset, c.init_from) == ("out-shakespeare", "shakespeare", "gpt2-xl")
    assert (c.lr_schedule, c.warmup_iters) == ("constant", 0), "decay_lr=False has no warmup there"
    assert c.eval_tokens == 40 * 1 * 1024 and c.total_batch_size == 32 * 1024 and c.keep_last == 1
    defaults = load(text="")
    assert (defaults.n_layer, defaults.n_embd, defaults.bias, defaults.weight_decay, defaults.grad_clip, defaults.beta2) == (12, 768, False, 0.1, 1.0, 0.95)
    assert (defaults.learning_rate, defaults.min_lr, defaults.warmup_iters) == (6e-4, pytest.approx(6e-5), 2000)
    assert defaults.total_batch_size == 491_520 and defaults.eval_tokens == 200 * 12 * 1024


def test_the_table_shows_every_setting_and_marks_what_was_given(load):
    text = table(load("--seed=5"))
    assert "*seed = 5" in text and " bias = False" in text and all(f"{k} = " in text for k in FIELDS if k not in NOT_OF_A_RUN)


@pytest.mark.parametrize("device, asked, bf16, expected", [
    ("cpu", "auto", False, ("float32", False, False)), ("mps", "auto", False, ("float32", False, False)),
    ("cuda", "auto", True, ("bfloat16", True, False)), ("cuda", "auto", False, ("float16", True, True)),
    ("cpu", "bfloat16", False, ("bfloat16", True, False)), ("mps", "float16", False, ("float16", True, True)),
    ("cuda", "float16", True, ("float16", True, True)), ("cuda", "float32", True, ("float32", False, False))])
def test_precision_by_device_and_request(device, asked, bf16, expected):
    p = choose_precision(device, asked, bf16)
    assert (p.dtype, p.autocast is not None, p.loss_scaling) == expected


def test_a_device_that_is_not_there_is_told():
    import torch

    with pytest.raises(UserError, match="auto, cpu, cuda"):
        choose_device("gpu")
    with pytest.raises(UserError, match="device=auto would work"):
        choose_device(f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(UserError, match="float16 or float32 would work"):
        choose_precision("cuda", "bfloat16", False)


def test_defaults_pass_their_own_checks():
    config = Config()
    config.out_dir = "out"
    resolve(config)


def test_a_config_file_may_import_what_it_likes(load):
    assert load(text="from math import sqrt\nfrom functools import partial\nn_embd = int(sqrt(64 * 64))\n").n_embd == 64
    assert "running it failed" in refused(load, text="import sys\nsys.exit()\n")[0]


@pytest.mark.parametrize("argument, word", [("--out_dir=", "out_dir is empty"), ("--threads=1000000", "cores"), ("--decay_fraction=1e-20", "decay_fraction")])
def test_settings_that_would_crash_are_refused(load, argument, word):
    assert word in refused(load, argument)[0]


def test_float8_is_refused_where_it_cannot_be(load, monkeypatch):
    """With what torch says of a GPU in place of one."""
    import importlib.util

    import torch

    from engine import float8
    from engine.config import Config

    def told(device, capability=(9, 0), installed=True, **settings):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        with pytest.raises(UserError) as error:
            float8.check_float8(Config(**{"float8": True, "dtype": "bfloat16", **settings}), torch.device(device))
        assert len(error.value.sentences) == 1
        return str(error.value)

    assert "device cpu" in told("cpu") and "device mps" in told("mps") and "GPU of 8.0" in told("cuda", (8, 0))
    assert "pip install torchao==" in told("cuda", installed=False)
    for settings, words in (({"dtype": "float16"}, "dtype=float16"), ({"lora_rank": 4}, "lora_rank=0 would work"), ({"tp": 2}, "tp=1 would work"),
                            ({"deterministic": True}, "deterministic=False would work")):
        assert words in told("cuda", **settings)
    float8.check_float8(Config(float8=True, dtype="bfloat16"), torch.device("cuda"))
    with pytest.raises(UserError, match="float8 needs a CUDA GPU"):
        start(Place(), load("--float8", "--device=cpu", "--dtype=bfloat16"))
    with pytest.raises(UserError, match="24 tokens at a time: a multiple of 16"):
        float8.check_tokens(Config(float8=True, batch_size=3, block_size=8))
