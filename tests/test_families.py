"""Hugging Face's families come in: the same logits and the same text as transformers, and what this model does not compute is refused by name."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from conftest import TINY, as_args, forked, records, run_script, several, torchrun, train
from engine.errors import UserError
from engine.families import layout, open_weights, read_config, stored_shape
from model import ModelConfig, generate, rope_table
from sample import load_model

CPU = torch.device("cpu")


def tokens(rows, length, vocab=259, seed=0):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (the reference, its folder in one file, its folder in shards), each made once."""
    made = {}

    def get(name):
        if name not in made:
            folder, model = tmp_path_factory.mktemp(name), zoo.make(name)
            model.save_pretrained(folder / "whole")
            model.save_pretrained(folder / "shards", max_shard_size="60KB")
            assert len(list((folder / "shards").glob("model-*.safetensors"))) > 1
            made[name] = model, folder / "whole", folder / "shards"
        return made[name]

    return get


@pytest.fixture
def qwen2(saved, tmp_path):
    """A folder of its own to spoil."""
    return shutil.copytree(saved("qwen2")[1], tmp_path / "qwen2")


def change(folder, **settings):
    """Sets keys of a config.json; a key set to ... is taken out."""
    config = {**json.loads((folder / "config.json").read_text()), **settings}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def refused(folder, *words, sentences=1):
    with pytest.raises(UserError) as caught:
        open_weights(str(folder))
    assert len(caught.value.sentences) == sentences and "\n" not in caught.value.sentences[0], caught.value
    for word in words:
        assert word in str(caught.value), caught.value


# -------------------------------------------------------------------------------------------- the same as transformers


@pytest.mark.parametrize("name", zoo.ZOO)
def test_logits_and_greedy_text_equal_those_of_transformers(saved, name):
    reference, whole, shards = saved(name)
    ours, again = (load_model(open_weights(str(folder)), CPU) for folder in (whole, shards))
    x = tokens(2, 90)
    with torch.no_grad():
        expected, got = reference(x).logits, ours(x)
    assert (expected - got).abs().max() < 1e-4 and expected.std() > 0.3, (expected - got).abs().max()
    assert torch.equal(got, again(x))
    prompt = tokens(2, 7, seed=4)
    assert torch.equal(torch.stack(list(generate(ours, prompt, 64, temperature=0)), dim=1), zoo.greedy(reference, prompt, 64))


def test_each_part_of_a_family_counts(saved):
    """The zoo would notice: a change of any switch moves the logits by more than the tolerance."""
    for name, switch in (("llama3", dict(rope_scaling=None)), ("llama3", dict(rope_high_freq_factor=2.0)), ("qwen2", dict(rope_theta=1e4)),
                         ("llama_linear", dict(rope_scaling=3.01)), ("llama3", dict(rope_scaling_type="linear")), ("qwen3_yarn", dict(rope_beta_fast=2.0)),
                         ("qwen3_yarn", dict(rope_attention_factor=None)), ("qwen3_yarn", dict(rope_original_context=40)),
                         ("llama3", dict(norm_eps=1e-3)), ("gpt2_untied", dict(mlp="gelu_tanh"))):
        weights = open_weights(str(saved(name)[1]))
        right = load_model(weights, CPU)(tokens(1, 90))
        weights.model_config = ModelConfig(**{**vars(weights.model_config), **switch})
        assert (load_model(weights, CPU)(tokens(1, 90)) - right).abs().max() > 1e-4, (name, switch)


def test_configurations_of_transformers_4_mean_the_same(saved, tmp_path):
    for name in ("llama3", "qwen2", "smollm2", "llama_linear", "qwen3_yarn"):
        folder = shutil.copytree(saved(name)[1], tmp_path / name)
        now = open_weights(str(folder)).model_config
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
        old = None if kind == "default" else {"type": kind, **rope}
        change(folder, rope_parameters=..., rope_theta=theta, rope_scaling=old, torch_dtype="float32", _name_or_path="x", rope_interleaved=False)
        assert open_weights(str(folder)).model_config == now


@pytest.mark.quick
@pytest.mark.parametrize("rope", [
    dict(rope_type="default"), dict(rope_type="linear", factor=4.0), dict(rope_type="linear", factor=2.5),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=4096),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
    dict(rope_type="yarn", factor=1.0, original_max_position_embeddings=16384), dict(rope_type="yarn", factor=6.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, beta_fast=20, beta_slow=2.5, truncate=True, attention_factor=None),
    dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=512, mscale=1.5, mscale_all_dim=0.7),
    dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=512, mscale=1.5, mscale_all_dim=0.7, attention_factor=1.1),
    dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=512, mscale=1.5, beta_fast=None),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)], ids=lambda r: f"{r['rope_type']} {r.get('factor', '')}")
def test_rope_tables_equal_those_of_transformers_at_every_position(rope, tmp_path):
    """Far beyond the original context: at position 16,000 a last bit of a frequency would be 1e-3."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=160, num_attention_heads=4, num_hidden_layers=1, max_position_embeddings=16384, rope_parameters={"rope_theta": 5e5, **rope})
    config.save_pretrained(tmp_path)
    table = rope_table(read_config(str(tmp_path / "config.json"), pytest.fail)[1])
    expected = torch.stack(LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(16384)[None]))[:, 0]
    assert table.shape == (2, 16384, 40) and (table - expected).abs().max() < 1e-6


LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], attention_dropout=0.0, hidden_act="silu", initializer_range=0.02, pretraining_tp=1,
             torch_dtype="bfloat16", use_cache=True, rms_norm_eps=1e-5, tie_word_embeddings=True)
QWEN = dict(attention_dropout=0.0, bos_token_id=151643, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000, tie_word_embeddings=True,
            torch_dtype="bfloat16", use_sliding_window=False, vocab_size=151936)


@pytest.mark.parametrize("count, config", [  # the hub's configurations, and the parameters that their models are known to have
    (1_557_611_200, dict(model_type="gpt2", activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, n_ctx=1024, n_embd=1600, n_head=25,
                         n_layer=48, n_positions=1024, output_past=True, summary_type="cls_index", layer_norm_epsilon=1e-5, vocab_size=50257,
                         task_specific_params={"text-generation": {"do_sample": True}})),
    (1_235_814_400, dict(LLAMA, head_dim=64, hidden_size=2048, intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32,
                         num_hidden_layers=16, num_key_value_heads=8, rope_theta=500000.0, vocab_size=128256, eos_token_id=[128001, 128008, 128009],
                         rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3"))),
    (134_515_008, dict(LLAMA, hidden_size=576, intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, num_attention_heads=9,
                       num_hidden_layers=30, num_key_value_heads=3, rope_interleaved=False, rope_scaling=None, rope_theta=100000, vocab_size=49152,
                       **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}})),
    (494_032_768, dict(QWEN, model_type="qwen2", hidden_size=896, intermediate_size=4864, max_position_embeddings=32768, max_window_layers=24,
                       num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, sliding_window=32768, use_mrope=False)),
    (596_049_920, dict(QWEN, model_type="qwen3", attention_bias=False, head_dim=128, hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960,
                       max_window_layers=28, num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rope_scaling=None, sliding_window=None))])
def test_the_hubs_configurations_are_read(count, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    family, model_config = read_config(str(tmp_path / "config.json"), pytest.fail)
    assert sum(math.prod(stored_shape(family, parts)) for parts in layout(family, model_config).values()) == count


def test_names_without_the_head_buffers_and_several_files_are_read(saved, tmp_path):
    reference, whole, _ = saved("gpt2")
    state = {n.removeprefix("transformer."): t for n, t in load_file(whole / "model.safetensors").items()}  # as the hub's gpt2 has them
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96) for i in range(3)} | {"lm_head.weight": state["wte.weight"].clone()}
    names = sorted(state)
    for part in (0, 1):  # two files, no index
        save_file({n: state[n] for n in names[part::2]}, tmp_path / f"part{part}.safetensors")
    shutil.copy(whole / "config.json", tmp_path)
    ours = load_model(open_weights(str(tmp_path)), CPU)
    assert ours.head is None and (ours(tokens(1, 20)) - reference(tokens(1, 20)).logits).abs().max() < 1e-4


def test_half_precision_is_read_exactly(saved, tmp_path):
    reference, whole, _ = saved("qwen3")
    state = {n: t.bfloat16() for n, t in load_file(whole / "model.safetensors").items()}
    shutil.copytree(whole, tmp_path / "bf16")
    save_file(state, tmp_path / "bf16" / "model.safetensors")
    weight = load_model(open_weights(str(tmp_path / "bf16")), CPU).blocks[1].attn.q.weight
    assert weight.dtype == torch.float32 and torch.equal(weight, state["model.layers.1.self_attn.q_proj.weight"].float())


def test_only_the_rows_asked_for_are_read(saved):
    """Of a matrix stored (in, out), of one of three in one tensor, and of a plain one."""
    for name, ours in (("gpt2", "blocks.1.mlp.up.weight"), ("gpt2", "blocks.1.attn.k.weight"), ("gpt2", "blocks.1.attn.k.bias"), ("qwen3", "wte.weight")):
        weights = open_weights(str(saved(name)[1]))
        shape, read = weights.sources[ours]
        whole = read(slice(None))
        assert tuple(whole.shape) == tuple(shape) and torch.equal(read(slice(5, 17)), whole[5:17]) and len(read(slice(0, 0))) == 0


# ------------------------------------------------------------------------------------------- what is refused, by name


@pytest.mark.parametrize("settings, words", [
    (dict(model_type="mixtral", num_local_experts=8), ["model_type='mixtral'", "qwen3"]), (dict(model_type=..., ), ["model_type=None"]),
    (dict(num_experts=8), ["num_experts=8"]), (dict(hidden_act="gelu"), ["hidden_act='gelu'", "silu"]),
    (dict(rope_parameters={"rope_type": "dynamic", "factor": 4.0}), ["'dynamic'", "default, llama3, linear, yarn"]),
    (dict(rope_parameters=None, rope_scaling={"type": "longrope", "short_factor": [1], "long_factor": [2]}), ["'longrope'"]),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "truncate": False}), ["yarn with truncate=false"]),
    (dict(rope_parameters={"rope_type": "yarn", "factor": None}), ["rope_scaling of None", "number above 0"]),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 0.5}), ["rope_scaling=0.5 with rope_scaling_type=yarn", "at least 1"]),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}), ["rope_beta_fast=1.0: expected a number above rope_beta_slow=1.0"]),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "mscale": "1", "mscale_all_dim": 1}), ["mscale='1'"]),
    (dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "beta_fast": 32}), ["beta_fast", "linear does not have"]),
    (dict(rope_parameters=None, rope_scaling={"type": "linear", "factor": "2"}), ["rope_scaling of '2'"]),
    (dict(rms_norm_eps=10**400), ["rms_norm_eps=1000"]),
    (dict(rope_parameters={"rope_type": "default", "mrope_section": [16, 24, 24]}), ["mrope_section"]),
    (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}), ["rope_low_freq_factor", "number above 0"]),
    (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), ["full_attention"]),
    (dict(rope_parameters={"rope_theta": "1e4"}), ["rope_theta of '1e4'"]), (dict(rope_scaling=[1]), ["rope_scaling=[1]"]),
    (dict(use_sliding_window=True, sliding_window=64, max_window_layers=1, layer_types=None), ["sliding_window=64"]),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), ["layer_types"]),
    (dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5"]), (dict(attention_bias=True), ["attention_bias=True"]),
    (dict(mlp_bias=True), ["mlp_bias=True"]), (dict(final_logit_softcapping=30.0), ["final_logit_softcapping=30.0"]),
    (dict(attn_logit_softcapping=50.0), ["attn_logit_softcapping"]), (dict(attention_dropout=0.1), ["attention_dropout=0.1"]),
    (dict(quantization_config={"quant_method": "gptq"}), ["quantization_config"]), (dict(rope_interleaved=True), ["rope_interleaved"]),
    (dict(hidden_size="48"), ["hidden_size='48'", "integer"]), (dict(num_hidden_layers=True), ["num_hidden_layers=True"]),
    (dict(vocab_size=...), ["no vocab_size"]), (dict(vocab_size=1 << 50), ["vocab_size=1125899906842624"]), (dict(hidden_size=-48), ["hidden_size=-48"]),
    (dict(rms_norm_eps=None), ["rms_norm_eps=None"]), (dict(tie_word_embeddings="yes"), ["tie_word_embeddings='yes'"]),
    (dict(num_key_value_heads=3), ["n_kv_head=3"]), (dict(num_hidden_layers=1 << 20, layer_types=None), ["3 layers", "1,048,576"])])
def test_a_configuration_that_is_not_computed_is_refused_by_name(qwen2, settings, words):
    change(qwen2, **settings)
    refused(qwen2, *words)


@pytest.mark.parametrize("name, settings, words", [
    ("gpt2", dict(activation_function="relu"), "activation_function='relu'"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    ("gpt2", dict(add_cross_attention=True), "add_cross_attention"), ("gpt2", dict(sliding_window=16), "sliding_window"),
    ("gpt2", dict(is_encoder_decoder=True), "is_encoder_decoder"),
    ("mistral", dict(sliding_window=64), "sliding_window=64"), ("mistral", dict(sliding_window=...), "sliding_window=4096"),
    ("mistral", dict(attention_bias=True), "attention_bias"), ("llama2", dict(sliding_window=64), "sliding_window=64"),
    ("llama_biases", dict(attention_bias="no"), "attention_bias='no'"), ("qwen3", dict(mlp_bias=True), "mlp_bias")])
def test_each_family_refuses_what_it_does_not_compute(saved, tmp_path, name, settings, words):
    folder = shutil.copytree(saved(name)[1], tmp_path / name)
    change(folder, **settings, **({} if name == "gpt2" else {"max_position_embeddings": 8192}))
    refused(folder, words)


def test_what_changes_nothing_is_passed_over(qwen2):
    before = open_weights(str(qwen2)).model_config
    change(qwen2, use_sliding_window=False, sliding_window=16, max_window_layers=1, layer_types=None, num_experts=None, use_mrope=False,
           torch_dtype="bfloat16",
           _attn_implementation_autoset=True, temperature=0.7, **{"transformers.js_config": {"x": 1}})
    assert open_weights(str(qwen2)).model_config == before
    change(qwen2, use_sliding_window=True, max_window_layers=3)  # the window begins at a layer that is not there
    assert open_weights(str(qwen2)).model_config == before


def test_code_beside_the_weights_is_not_run(qwen2):
    (qwen2 / "modeling_evil.py").write_text("open('pwned', 'w')")
    change(qwen2, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    said = []
    open_weights(str(qwen2), said.append)
    assert len(said) == 1 and "auto_map" in said[0] and "not run" in said[0] and not os.path.exists("pwned")


def respoil(folder, edit):
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_listed(qwen2):
    def edit(state):
        del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]
        state["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(48)
        state["model.layers.2.input_layernorm.weight"] = torch.ones(47)

    respoil(qwen2, edit)
    refused(qwen2, "lacks model.layers.1.mlp.up_proj.weight, model.norm.weight", "has model.layers.0.self_attn.o_proj.bias",
            "model.layers.2.input_layernorm.weight of shape (47,) in place of (48,)", sentences=3)


def test_a_tied_head_must_be_the_embedding(qwen2):
    respoil(qwen2, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    assert load_model(open_weights(str(qwen2)), CPU).head is None
    respoil(qwen2, lambda state: state["lm_head.weight"].add_(1))
    refused(qwen2, "tie_word_embeddings", "lm_head.weight")
    change(qwen2, tie_word_embeddings=False)
    assert load_model(open_weights(str(qwen2)), CPU).head is not None


def test_weights_that_are_no_floating_point_numbers_are_refused(qwen2):
    respoil(qwen2, lambda state: state.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    refused(qwen2, "model.norm.weight in I8", "BF16")


def test_an_index_must_go_with_its_files(saved, tmp_path):
    folder = shutil.copytree(saved("llama2")[2], tmp_path / "shards")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for wrong, word in (({}, "weight_map"), ({"a": "../../etc/passwd"}, "files of its folder"), ({"a": 3}, "files of its folder"),
                        ({**index["weight_map"], "model.more": index["weight_map"]["model.norm.weight"]}, "model.more")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": wrong}))
        refused(folder, word)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.unlink(next(folder.glob("model-00002*")))
    refused(folder, "model-00002", "No such file")


def test_sentences_reach_the_user_with_exit_code_2(qwen2, data, tmp_path):
    change(qwen2, hidden_act="gelu")
    for command in (["sample.py", f"--init_from={qwen2}"], ["train.py", "tests/empty_config.py", f"--init_from={qwen2}", f"--dataset={data}",
                                                            f"--out_dir={tmp_path / 'run'}"],
                    ["sample.py", f"--init_from={qwen2}", f"--export={tmp_path / 'out'}"]):
        result = run_script(*command)
        assert result.code == 2 and len(result.errors) == 1 and "hidden_act" in result.errors[0] and "Traceback" not in result.err, result.err
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()


def test_a_name_without_a_network_is_one_sentence_and_its_cache_is_used(saved, tmp_path):
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for name in ("some-lab/some-model", "some-lab/some-model@v1.0"):
        result = run_script("sample.py", f"--init_from={name}", env=env)
        assert result.code == 2 and len(result.errors) == 1 and "some-lab/some-model" in result.errors[0] and "Traceback" not in result.err
    commit = "0123456789" * 4
    for revision in ("main", "v1.0"):
        ref = tmp_path / "hub" / "models--some-lab--some-model" / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    shutil.copytree(saved("qwen2")[1], ref.parent.parent / "snapshots" / commit)
    for name in ("some-lab/some-model", "some-lab/some-model@v1.0"):
        result = run_script("sample.py", f"--init_from={name}", "--tokenizer=byte", "--max_new_tokens=5", "--device=cpu", env=env)
        assert result.code == 0, result.err


# ---------------------------------------------------------------------------------------------------------- training


def tune(out_dir, data, weights, **settings):
    """A run on TINY settings from weights, whose sizes count."""
    sizes = ("n_layer", "n_head", "n_embd")
    config = out_dir.parent / f"{out_dir.name}.py"
    config.write_text("".join(f"{k} = {v!r}\n" for k, v in TINY.items() if k not in sizes))
    result = forked(1, "train.py", config, f"--out_dir={out_dir}", f"--dataset={data}", f"--init_from={weights}", *as_args(settings))
    assert "Traceback" not in result.err, result.err
    return result


def test_tied_heads_stay_tied_and_the_table_keeps_its_size_through_training(saved, data, tmp_path):
    """259 rows for a tokenizer of 257: kept, and saved as they are padded."""
    assert tune(tmp_path / "run", data, saved("qwen2")[1], max_iters=3, learning_rate=1e-3).code == 0
    weights = open_weights(str(tmp_path / "run"))
    assert weights.model_config.vocab_size == 259 and "head.weight" not in weights.sources
    before = open_weights(str(saved("qwen2")[1])).sources["wte.weight"][1](slice(None))
    after = weights.sources["wte.weight"][1](slice(0, 259))
    assert after.shape == before.shape and not torch.equal(before, after)
    text = forked(1, "sample.py", f"--out_dir={tmp_path / 'run'}", "--temperature=5", "--top_k=none", "--max_new_tokens=200", "--num_samples=8",
                      "--device=cpu")
    assert text.code == 0, text.err  # an id beyond the tokenizer would be refused


def test_positions_are_cropped_and_only_rope_has_more(saved, data, tmp_path):
    gpt2, qwen = str(saved("gpt2")[1]), str(saved("qwen2")[1])
    assert tune(tmp_path / "a", data, gpt2, max_iters=1).code == 0  # TINY's block_size is 16, GPT-2's 96
    assert open_weights(str(tmp_path / "a")).model_config.block_size == 16
    result = tune(tmp_path / "b", data, gpt2, max_iters=1, block_size=128)
    assert result.code == 2 and len(result.errors) == 1 and "positions are learned" in result.errors[0] and not (tmp_path / "b").exists()
    result = tune(tmp_path / "c", data, qwen, max_iters=1, block_size=256, batch_size=1, total_batch_size=256)
    assert result.code == 0 and "block_size=256 is longer than the 128" in result.out
    assert open_weights(str(tmp_path / "c")).model_config.block_size == 256


def test_a_branch_goes_on_at_a_longer_context_by_what_a_user_types(data, tmp_path):
    """Rope trained at 16 tokens goes on at 64; the same command goes on from there; learned positions have no more."""
    longer = dict(block_size=64, init_from=tmp_path / "short", rope_scaling=4)
    yarn = (tmp_path / "yarn", data, {**longer, "rope_scaling_type": "yarn", "max_iters": 1})
    said = several(1, [
        (tmp_path / "short", data, dict(pos="rope", norm="rmsnorm", head_dim=16, max_iters=3)), (tmp_path / "learned", data, dict(max_iters=1)),
        yarn, (tmp_path / "linear", data, {**longer, "rope_scaling_type": "linear", "max_iters": 0}), (tmp_path / "llama3", data, {**longer, "max_iters": 0}),
        (*yarn[:2], {**yarn[2], "max_iters": 2}),
        (tmp_path / "again", data, dict(block_size=80, total_batch_size=160, init_from=tmp_path / "yarn", rope_scaling=5, max_iters=0))]).out
    for name, kind, length, factor in (("yarn", "yarn", 64, 4), ("linear", "linear", 64, 4), ("llama3", "llama3", 64, 4), ("again", "yarn", 80, 5)):
        c = open_weights(str(tmp_path / name)).model_config
        assert (c.rope_scaling_type, c.block_size, c.rope_scaling, c.rope_original_context) == (kind, length, factor, 16), "it is known what it was before any scaling"
    assert [r["step"] for r in records(tmp_path / "yarn")] == [1, 2]
    assert "rope_scaling=4.0, rope_scaling_type=yarn, rope_original_context=16 from here on, not by None, llama3, 8192 as " in said
    refused = train(tmp_path / "yarn", data, **{**yarn[2], "rope_scaling": 8, "max_iters": 3}, expect=2)
    assert len(refused.errors) == 1 and "rope_scaling is 4.0 in" in refused.errors[0]
    refused = train(tmp_path / "no", data, **{**longer, "init_from": tmp_path / "learned"}, expect=2)
    assert len(refused.errors) == 2 and "positions are learned" in refused.errors[0] and "rope_scaling is None in" in refused.errors[1]


def test_a_larger_vocabulary_is_refused_unless_asked_for(saved, data, tmp_path):
    gpt2 = saved("gpt2")[1]
    result = tune(tmp_path / "a", data, gpt2, max_iters=0, vocab_size=400)
    assert result.code == 2 and len(result.errors) == 1 and "--resize_vocab" in result.errors[0] and not (tmp_path / "a").exists()
    result = tune(tmp_path / "b", data, gpt2, max_iters=0, vocab_size=400, resize_vocab=True)
    assert result.code == 0 and "rows 259 to 399" in result.out
    rows = open_weights(str(tmp_path / "b")).sources["wte.weight"][1](slice(None))
    old = load_file(gpt2 / "model.safetensors")["transformer.wte.weight"]
    assert rows.shape == (448, 48) and torch.equal(rows[:259], old) and 0.01 < rows[259:].std() < 0.03


def test_checkpoints_without_the_new_switches_load_and_go_on(data, tmp_path):
    from engine import checkpoint as ckpt
    from engine.config import ROPE

    new = ("qkv_bias", "o_bias", *ROPE[1:], "resize_vocab")
    train(tmp_path / "run", data, max_iters=2, bias=True, pos="rope")
    path = tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    for part in ("model", "config"):
        manifest[part] = {k: v for k, v in manifest[part].items() if k not in new}
    path.write_text(json.dumps({**manifest, "sha256": ckpt.json_checksum(manifest)}))
    assert open_weights(str(tmp_path / "run")).model_config.qkv_bias is True
    result = train(tmp_path / "run", data, max_iters=3, bias=True, pos="rope", rope_scaling=8.0, expect=2)
    assert len(result.errors) == 1 and "rope_scaling is None" in result.errors[0]
    train(tmp_path / "run", data, max_iters=3, bias=True, pos="rope")
    assert len(records(tmp_path / "run")) == 3


def test_four_fsdp_ranks_read_only_their_rows(tmp_path):
    """Peak memory while a model of Qwen3's layout, and one of GPT-2's, whose matrices are stored transposed, comes in on four ranks."""
    result = torchrun(4, "tests/ranks.py", "loading", tmp_path)
    assert result.code == 0, result.err
    for name in ("qwen3", "gpt2"):
        for rank in range(1, 4):
            m = json.loads((tmp_path / f"loading-{name}-{rank}.json").read_text())
            assert m["equal"] and m["held"] < 0.27 * m["whole"]
            assert m["peak"] < 0.6 * m["whole"], f"rank {rank} took {m['peak'] / m['whole']:.2f} of {name} to load it"
