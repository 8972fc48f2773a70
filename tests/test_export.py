"""What is trained here is everyone's: an exported folder loads in transformers without a missing or unexpected key, and computes the same."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import zoo
from conftest import ASSETS, ROOT, TINY, as_args, forked, records, some_text, train
from data.chat import ChatTemplate, with_turns
from data.shards import TokenDataset
from data.tokenizers import byte_tokenizer, char_tokenizer, load_tokenizer
from engine import export as exporting
from engine.errors import UserError
from engine.export import as_engine, export
from engine.families import Weights, open_weights
from model import GPT, ModelConfig
from sample import load_model
from test_families import CPU, tokens
from test_tokenizers import gpt2, small_json

TEXTS = ["def f(x):\n\treturn x + 1\n", "", " ", "héllo ✓ 你好 👩‍👩‍👧 e\u0301\r\n\0 ", "it's  12345   \n\n  #don't",
         "<|endofte", "\ufffd\u2028\x85"]


def load(folder):
    """The folder's model in transformers, which must have found each of its keys and no other."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def quiet(sentence):
    pass


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_round_trip_is_the_same_bits_and_the_same_logits(name, tmp_path, monkeypatch):
    reference = zoo.make(name)
    reference.save_pretrained(tmp_path / "theirs")
    weights = open_weights(str(tmp_path / "theirs"))
    export(weights, None, tmp_path / "ours", quiet)
    monkeypatch.setattr(exporting, "SHARD_BYTES", 60_000)
    export(weights, None, tmp_path / "shards", quiet)
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    sharded = {}
    for file in (tmp_path / "shards").glob("*.safetensors"):
        sharded |= (part := load_file(file))
        assert sum(t.numel() * 4 for t in part.values()) <= 60_000 or len(part) == 1
    assert after.keys() == sharded.keys() and all(torch.equal(after[n], sharded[n]) for n in after)
    kinds = {n: json.loads((tmp_path / n / "config.json").read_text())["model_type"] for n in ("theirs", "ours")}
    assert kinds["ours"] == {"mistral": "llama"}.get(kinds["theirs"], kinds["theirs"])
    x = tokens(2, 90)
    with torch.no_grad():
        expected = reference(x).logits
        for folder in ("ours", "shards"):
            assert torch.equal(load(tmp_path / folder)(x).logits, expected)
    for folder in ("ours", "shards"):
        assert open_weights(str(tmp_path / folder)).model_config == weights.model_config


OURS = {
    "nanogpt": dict(bias=False), "gpt2": {}, "gpt2_tanh": dict(mlp="gelu_tanh", tie_embeddings=False), "qkv": dict(bias=False, qkv_bias=True),
    "llama": dict(norm="rmsnorm", pos="rope", mlp="swiglu", n_kv_head=1, bias=False, rope_scaling=8.0, rope_original_context=16),
    "linear": dict(norm="rmsnorm", pos="rope", mlp="swiglu", bias=False, rope_scaling=2.0, rope_scaling_type="linear"),
    "yarn": dict(norm="rmsnorm", pos="rope", mlp="swiglu", bias=False, rope_scaling=4.0, rope_scaling_type="yarn", rope_original_context=8),
    "odd_heads": dict(norm="rmsnorm", pos="rope", mlp="swiglu", bias=False, n_head=5, head_dim=8),
    "qwen3": dict(norm="rmsnorm", pos="rope", mlp="swiglu", qk_norm=True, head_dim=20, bias=False, o_bias=True, tie_embeddings=False)}


def made(**settings):
    config = ModelConfig(**{"block_size": 32, "vocab_size": 257, "n_layer": 2, "n_head": 4, "n_embd": 48, **settings})
    assert not config.problems()
    model = GPT(config)
    model.init_weights(0)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    return model, Weights("a model", config, {n: (p.shape, lambda rows, p=p: p.detach()[rows]) for n, p in model.named_parameters()}, None)


@pytest.mark.parametrize("name", OURS)
def test_our_switches_are_expressed_in_a_family(name, tmp_path):
    model, weights = made(**OURS[name])
    export(weights, byte_tokenizer(), tmp_path / "out", quiet)
    x = tokens(2, 32, 257)
    with torch.no_grad():
        got = load(tmp_path / "out")(x).logits
        assert got.shape == (2, 32, 257) and (got - model(x)).abs().max() < 1e-4
        assert (load_model(open_weights(str(tmp_path / "out")), CPU)(x) - model(x)).abs().max() < 1e-5


@pytest.mark.parametrize("settings, words", [
    (dict(mlp="relu2"), ["mlp=relu2"]), (dict(qk_norm=True), ["qk_norm=True"]), (dict(pos="rope"), ["pos=rope"]), (dict(n_kv_head=2), ["n_kv_head=2"]),
    (dict(norm="rmsnorm", pos="rope", mlp="swiglu", qk_norm=True), ["bias=True"]), (dict(norm="rmsnorm", pos="rope", bias=False), ["mlp=gelu"])])
def test_what_no_family_has_is_refused_with_the_switch_named(settings, words, tmp_path):
    with pytest.raises(UserError) as caught:
        export(made(**settings)[1], None, tmp_path / "out", quiet)
    assert all(w in str(caught.value) for w in words) and not os.listdir(tmp_path)


def test_memory_is_that_of_one_tensor(tmp_path, monkeypatch):
    """Rows are asked of one stored tensor's parts at a time, and each is let go before the next."""
    import weakref

    _, weights = made(bias=False)
    alive = weakref.WeakSet()

    def counted(read):
        def rows(r):
            t = read(r).clone()
            if len(t):
                alive.add(t)
            assert len(alive) <= 4, "q, k and v and the one before"
            return t
        return rows

    weights.sources = {n: (shape, counted(read)) for n, (shape, read) in weights.sources.items()}
    export(weights, None, tmp_path / "out", quiet)


def test_an_export_of_a_large_model_takes_the_memory_of_a_small_one(tmp_path):
    """126 MB of weights through a process that has 40 MB for them, pages of mapped files included."""
    config = ModelConfig(block_size=16, vocab_size=257, n_layer=10, n_head=8, n_embd=512, bias=False)
    with torch.device("meta"):
        first_values = GPT(config).first_values(0)
    export(Weights("random", config, first_values, None), None, tmp_path / "a", quiet)
    code = """
import resource, sys
from engine.export import export
from engine.families import open_weights
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
export(open_weights(sys.argv[1]), None, sys.argv[2], lambda sentence: None)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / "model.safetensors").stat().st_size > 120e6 and float(done.stdout) < 40
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_the_vocabulary_grows_to_the_datas(data, tmp_path):
    """Weights of 100 tokens, data of 257, asked for: the first 100 rows are those of the weights."""
    model, weights = made(vocab_size=100, norm="rmsnorm", pos="rope", mlp="swiglu", bias=False, tie_embeddings=False)
    export(weights, None, tmp_path / "small", quiet)
    settings = [f"--{k}={v}" for k, v in TINY.items() if k not in ("n_layer", "n_head", "n_embd")]
    for extra, code in (([], 2), (["--resize_vocab"], 0)):
        result = forked(1, "train.py", "tests/empty_config.py", *settings, f"--init_from={tmp_path / 'small'}", f"--dataset={data}",
                            "--max_iters=0", *extra,
                            f"--out_dir={tmp_path / 'run'}")
        assert result.code == code and len(result.errors) == (code > 0), result.err
    sources = open_weights(str(tmp_path / "run")).sources
    assert torch.equal(sources["head.weight"][1](slice(0, 100)), model.head.weight[:100]) and sources["head.weight"][0][0] == 320


def test_a_dtype_may_be_asked_for(tmp_path):
    model, weights = made(**OURS["llama"])
    export(weights, None, tmp_path / "out", quiet, "bfloat16")
    found = load(tmp_path / "out")
    assert found.dtype == torch.bfloat16 and torch.equal(found.model.norm.weight, model.norm.weight.bfloat16())
    export(open_weights(str(tmp_path / "out")), None, tmp_path / "again", quiet)  # as they are stored
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


# --------------------------------------------------------------------------------------------------- complete or absent


def test_a_folder_in_use_is_refused_and_an_empty_one_is_taken(tmp_path):
    _, weights = made()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("used", "file", "file/below"):
        with pytest.raises(UserError) as caught:
            export(weights, None, tmp_path / name, quiet)
        assert len(caught.value.sentences) == 1 and name in str(caught.value)
    (tmp_path / "empty").mkdir()
    export(weights, None, tmp_path / "empty", quiet)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "used"] and os.listdir(tmp_path / "used") == ["thesis.tex"]


def test_an_export_that_fails_leaves_nothing_and_a_killed_one_is_no_hindrance(tmp_path):
    import errno

    _, weights = made()
    shape, read = weights.sources["norm.weight"]

    def full(rows):
        if rows.stop:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return read(rows)

    weights.sources["norm.weight"] = (shape, full)
    with pytest.raises(UserError, match="no room to write"):
        export(weights, None, tmp_path / "out", quiet)
    assert not os.listdir(tmp_path)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
    weights.sources["norm.weight"] = (shape, read)
    export(weights, None, tmp_path / "out", quiet)
    assert os.listdir(tmp_path) == ["out"]


# ----------------------------------------------------------------------------------------------------------- tokenizers


def same_ids_and_text(ours, folder, texts):
    """In transformers, and read back here, where it counts as the same tokenizer."""
    from transformers import AutoTokenizer

    theirs, again = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder / "tokenizer.json"))
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids == again.encode(text), text
        assert theirs.decode(ids) == ours.decode(ids) == again.decode(ids) == text
    assert len(theirs) == ours.vocab_size and again.fingerprint == ours.fingerprint and again.eot_id == ours.eot_id
    assert theirs.eos_token_id == ours.eot_id
    return theirs


def test_a_byte_tokenizer_goes_along(tmp_path):
    ours = byte_tokenizer()
    export(made()[1], ours, tmp_path / "out", quiet)
    theirs = same_ids_and_text(ours, tmp_path / "out", TEXTS)
    again = open_weights(str(tmp_path / "out"))
    export(again, again.tokenizer, tmp_path / "again", quiet)
    assert all((tmp_path / "again" / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in os.listdir(tmp_path / "out"))
    for ids in ([255, 97, 0xC3], [0xE2, 0x9C], [0xF0, 0x9F, 65, 0x80, 0x80], [97, 256, 98]):  # no UTF-8
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.parametrize("with_eot", [False, True])
def test_a_char_tokenizer_goes_along(tmp_path, with_eot):
    ours = char_tokenizer("".join(TEXTS) + "abc▁<0x41>", with_eot)
    export(made(vocab_size=ours.vocab_size)[1], ours, tmp_path / "out", quiet)
    theirs = same_ids_and_text(ours, tmp_path / "out", TEXTS + ["a▁b c <0x41>"])
    with pytest.raises(Exception):
        theirs.encode("Ω")  # a character that the corpus does not have, as here
    with pytest.raises(UserError, match="surrogate"):
        as_engine(char_tokenizer("a\ud800", False))


def test_gpt2s_tokenizer_goes_along(tmp_path, monkeypatch):
    folder = os.path.join(ASSETS, "tiktoken")
    if not os.path.isdir(folder) and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("GPT-2's vocabulary is not here")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", os.environ.get("TIKTOKEN_CACHE_DIR", folder))
    ours = load_tokenizer("gpt2")
    export(made(vocab_size=50257)[1], ours, tmp_path / "out", quiet)
    code = open(os.path.join(os.path.dirname(json.__file__), "decoder.py"), encoding="utf-8").read()
    same_ids_and_text(ours, tmp_path / "out", TEXTS + [code, some_text(3000), " don't you'LL 3.14159 \u00a0x" * 3])


@pytest.mark.parametrize("kind", ["byte", "gpt2", "json"])
def test_chatmls_tokens_go_along_and_so_does_its_template(tmp_path, kind):
    base = byte_tokenizer() if kind == "byte" else gpt2() if kind == "gpt2" else load_tokenizer(small_json(tmp_path / "small"))
    ours = with_turns(base)
    export(made(vocab_size=ours.vocab_size)[1], ours, tmp_path / "out", quiet)
    theirs = same_ids_and_text(ours, tmp_path / "out", ["a few words"])
    talk = [{"role": "user", "content": "a few"}, {"role": "assistant", "content": "words"}, {"role": "user", "content": "more"}]
    template = ChatTemplate(ours)
    for more in (False, True):
        assert theirs.apply_chat_template(talk, tokenize=True, return_dict=False, add_generation_prompt=more) == template.render(talk, more).ids
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == template.stop_ids
    assert ChatTemplate(open_weights(str(tmp_path / "out")).tokenizer).render(talk).ids == template.render(talk).ids


def test_the_ids_of_the_ends_are_written(tmp_path):
    export(made()[1], byte_tokenizer(), tmp_path / "out", quiet)
    for file in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "out" / file).read_text())
        assert found["bos_token_id"] == found["eos_token_id"] == 256


# ----------------------------------------------------------------------------------------------------------- from a run


def test_a_run_of_four_fsdp_ranks_exports_with_the_loss_it_logged(data, tmp_path):
    shape = dict(norm="rmsnorm", pos="rope", mlp="swiglu", n_head=3, n_kv_head=1, qk_norm=True, head_dim=10)
    settings = {**TINY, **shape, "max_iters": 6, "parallel": "fsdp", "eval_interval": 6, "eval_tokens": 320}
    result = forked(4, "train.py", "tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", f"--dataset={data}", *as_args(settings))
    assert result.code == 0, result.err
    assert len(list((tmp_path / "run" / "checkpoints" / "step_00000006").glob("model_*_of_00004.safetensors"))) == 4
    done = forked(1, "sample.py", f"--out_dir={tmp_path / 'run'}", f"--export={tmp_path / 'out'}")
    assert done.code == 0 and "Qwen3ForCausalLM" in done.out, done.err
    logged = records(tmp_path / "run", "val")[-1]["loss"]
    val, total, windows = TokenDataset(data, "val"), 0.0, 320 // 16
    model = load(tmp_path / "out")
    for i in range(windows):
        x = torch.from_numpy(val.read(i * 16, 17))
        with torch.no_grad():
            total += torch.nn.functional.cross_entropy(model(x[None, :-1]).logits[0], x[1:], reduction="sum").item()
    assert abs(total / 320 - logged) < 1e-5 * logged, (total / 320, logged)


def test_nanogpts_checkpoint_exports(tmp_path):
    """Its vocabulary of 50304 rows and all, from a file made as it makes them."""
    torch.manual_seed(0)
    args = dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=50304, dropout=0.0)
    model, _ = made(**{**args, "n_layer": 1})
    state = {"transformer.wte.weight": model.wte.weight, "lm_head.weight": model.wte.weight, "transformer.wpe.weight": model.wpe.weight,
             "transformer.ln_f.weight": model.norm.weight}
    block, at = model.blocks[0], "transformer.h.0."
    state |= {at + "ln_1.weight": block.norm1.weight, at + "ln_2.weight": block.norm2.weight, at + "attn.c_proj.weight": block.attn.o.weight,
              at + "attn.c_attn.weight": torch.cat([block.attn.q.weight, block.attn.k.weight, block.attn.v.weight]),
              at + "mlp.c_fc.weight": block.mlp.up.weight, at + "mlp.c_proj.weight": block.mlp.down.weight}
    torch.save({"model": {"_orig_mod." + n: t.detach() for n, t in state.items()}, "model_args": args, "config": {}}, tmp_path / "ckpt.pt")
    done = forked(1, "sample.py", f"--init_from={tmp_path / 'ckpt.pt'}", f"--export={tmp_path / 'out'}")
    assert done.code == 0, done.err
    x = tokens(1, 16, 50304)
    with torch.no_grad():
        assert (load(tmp_path / "out")(x).logits - model(x)).abs().max() < 1e-4


def test_a_sharded_checkpoint_of_ours_and_a_single_one_export_alike(data, tmp_path):
    run = train(tmp_path / "run", data, max_iters=2, bias=True)
    assert run.code == 0
    for i, args in enumerate(([f"--out_dir={tmp_path / 'run'}"], [f"--init_from={tmp_path / 'run' / 'checkpoints' / 'step_00000002'}"])):
        assert forked(1, "sample.py", *args, f"--export={tmp_path / str(i)}").code == 0
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == (tmp_path / "1" / "model.safetensors").read_bytes()
    kept = load_file(tmp_path / "run" / "checkpoints" / "step_00000002" / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "0" / "model.safetensors")["transformer.wte.weight"], kept["wte.weight"][:257])
    text = [forked(1, "sample.py", a, "--start=def ", "--max_new_tokens=30", "--seed=3", "--device=cpu").out
            for a in (f"--out_dir={tmp_path / 'run'}", f"--init_from={tmp_path / '0'}")]
    assert text[0] == text[1] and len(text[0]) > 20
