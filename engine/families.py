"""Weights from elsewhere under this project's names: Hugging Face's GPT-2, Llama, Mistral, Qwen2 and Qwen3, and nanoGPT's ckpt.pt.

A family is a table of names, read in both directions: here for what comes in, in engine/export.py for what goes out. Every family is the one
block of model.py under other switches. Nothing is unpickled or executed; what a config.json asks for and this model does not
compute is refused by name.
"""

import dataclasses
import functools
import glob
import math
import os
import re
import reprlib
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data.shards import TokenDataset, find_dataset
from data.tokenizers import load_tokenizer, tokenizer_from_identity
from engine import lora
from engine.checkpoint import Checkpoint, list_steps, newest_complete, open_checkpoint
from engine.config import ROOT, expected_type, nearest
from engine.errors import UserError
from engine.untrusted import load_torch, read_json, refuse
from model import GPT, ModelConfig

GPT2_NAMES = {"gpt2": "openai-community/gpt2", "gpt2-medium": "openai-community/gpt2-medium",
              "gpt2-large": "openai-community/gpt2-large", "gpt2-xl": "openai-community/gpt2-xl"}

LARGEST_SIZE = 1 << 20  # of anything in a configuration: beyond what any model has, and three of them multiply without overflow
DTYPES = ("F32", "F16", "BF16", "F64")  # of weights that can be read


@dataclass
class Weights:
    """A model found somewhere: its architecture, its tensors by our names, read when called for."""

    path: str
    model_config: ModelConfig
    sources: dict[str, Any]  # name -> (shape, function of a slice that reads those rows), for checkpoint.fill
    tokenizer: Any  # None where nothing says which one it was trained with
    checkpoint: Checkpoint | None = None  # where it is one of ours, which has an optimizer's state too


def open_weights(where: str, say=print) -> Weights:
    """The Weights at `where`: a run folder (its newest checkpoint), one of its checkpoints, a nanoGPT ckpt.pt or its folder, a
    Hugging Face folder, or a name on its hub, NAME@REVISION for another one than its newest. UserError, a sentence, where there is none that can be read."""
    if os.path.isfile(os.path.join(where, "manifest.json")):
        return of_checkpoint(open_checkpoint(where))
    if list_steps(where):
        return of_checkpoint(newest_complete(where, say))
    if where.endswith(".pt") or os.path.isfile(os.path.join(where, "ckpt.pt")):
        return of_nanogpt(where if where.endswith(".pt") else os.path.join(where, "ckpt.pt"))
    there = os.listdir(where) if os.path.isdir(where) else []
    if "config.json" in there and any(n.endswith((".safetensors", ".safetensors.index.json")) for n in there):
        return of_huggingface(where, say)
    if ".metadata" in there or any(n.endswith(".distcp") for n in [*there, where]):
        raise UserError(f"{where} is written by torch.distributed.checkpoint, whose .metadata would have to be unpickled, and a pickle can run any code: "
                        "a run of ours, a Hugging Face folder of safetensors and a nanoGPT ckpt.pt work; where you trust it, "
                        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch turns it into one file to convert")
    if any(n.endswith((".bin", ".pth")) for n in [*there, where]):
        raise UserError(f"{where} holds pickled weights (.bin, .pth), and a pickle can run any code: the same model as safetensors works, which "
                        "save_pretrained of transformers writes")
    if os.path.exists(where):
        raise UserError(f"{where} holds no weights: expected a run or checkpoint folder, a nanoGPT ckpt.pt, or a Hugging Face "
                        "folder with config.json and .safetensors files")
    name, _, revision = where.partition("@")
    if name in GPT2_NAMES or name.count("/") == 1 and not where.startswith((".", "/", "out/")):
        return of_huggingface(download(GPT2_NAMES.get(name, name), revision or None), say)
    raise UserError(f"there is nothing at {where}{nearest(name, list(GPT2_NAMES))}")


def of_checkpoint(checkpoint: Checkpoint) -> Weights:
    """The Weights of a checkpoint of ours, adapters merged into them."""
    sources = lora.merged(checkpoint.sources("model"), checkpoint.manifest.get("config", {}), checkpoint.path)
    return Weights(checkpoint.path, checkpoint.model_config(), sources, checkpoint.tokenizer(), checkpoint)


# ----------------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face in this model's terms."""

    model_type: str
    architecture: str  # the class that transformers loads it as
    sizes: dict  # config.json's key -> field of ModelConfig
    activation: tuple  # config.json's key of it, and {its value: ModelConfig.mlp}, the first of those with the same meaning being written
    switches: dict  # field of ModelConfig -> the values it may have; one alone is what it always has
    names: dict  # our module -> theirs; several of ours may lie in one of theirs, one after the other
    layers: str  # what precedes a block's modules
    defaults: dict = dataclasses.field(default_factory=dict)  # what transformers takes where config.json lacks a key
    only: dict = dataclasses.field(default_factory=dict)  # config.json's key -> the values under which the computation is this model's
    bias_keys: tuple = ()  # those of attention_bias and mlp_bias that it has
    transposed: bool = False  # matrices in blocks are stored (in, out)

    def their_name(self, name: str) -> str:
        words = name.split(".")
        layer = self.layers.format(words[1]) if words[0] == "blocks" else ""
        return f"{layer}{self.names['.'.join(words[2 if layer else 0:-1])]}.{words[-1]}"

    def flips(self, name: str) -> bool:
        """Whether the tensor of our name is stored transposed."""
        return self.transposed and name.startswith("blocks.") and name.endswith(".weight") and ".norm" not in name


GPT2 = Family(
    model_type="gpt2", architecture="GPT2LMHeadModel",
    sizes={"n_positions": "block_size", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd",
           "n_inner": "mlp_hidden", "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tie_embeddings"},
    activation=("activation_function", {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}),
    switches={"norm": ("layernorm",), "pos": ("learned",), "mlp": ("gelu_tanh", "gelu"), "qk_norm": (False,), "bias": (True, False),
              "qkv_bias": (True, False), "o_bias": (True, False)},
    names={"wte": "transformer.wte", "wpe": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head", "norm1": "ln_1", "norm2": "ln_2",
           "attn.q": "attn.c_attn", "attn.k": "attn.c_attn", "attn.v": "attn.c_attn", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc",
           "mlp.down": "mlp.c_proj"},
    layers="transformer.h.{}.", transposed=True,
    defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"},
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)})

LLAMA = Family(
    model_type="llama", architecture="LlamaForCausalLM",
    sizes={"max_position_embeddings": "block_size", "vocab_size": "vocab_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
           "num_key_value_heads": "n_kv_head", "hidden_size": "n_embd", "head_dim": "head_dim", "intermediate_size": "mlp_hidden",
           "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings"},
    activation=("hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
    switches={"norm": ("rmsnorm",), "pos": ("rope",), "mlp": ("swiglu",), "qk_norm": (False,), "bias": (False, True), "qkv_bias": (False, True),
              "o_bias": (False, True)},
    names={"wte": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
           "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
           "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
           "mlp.down": "mlp.down_proj"},
    layers="model.layers.{}.",
    defaults={"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"},
    only={"attention_dropout": (0, None), "partial_rotary_factor": (1, None)}, bias_keys=("attention_bias", "mlp_bias"))

MISTRAL = dataclasses.replace(
    LLAMA, model_type="mistral", architecture="MistralForCausalLM", bias_keys=(),
    switches={**LLAMA.switches, "bias": (False,), "qkv_bias": (False,), "o_bias": (False,)},
    defaults={**LLAMA.defaults, "num_key_value_heads": 8, "sliding_window": 4096})

QWEN2 = dataclasses.replace(
    MISTRAL, model_type="qwen2", architecture="Qwen2ForCausalLM", switches={**MISTRAL.switches, "qkv_bias": (True,)},
    defaults={**LLAMA.defaults, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28})

QWEN3 = dataclasses.replace(
    QWEN2, model_type="qwen3", architecture="Qwen3ForCausalLM", bias_keys=("attention_bias",),
    switches={**LLAMA.switches, "bias": (False,), "qk_norm": (True,)}, defaults={**QWEN2.defaults, "head_dim": 128})

FAMILIES = {f.model_type: f for f in (GPT2, QWEN2, QWEN3, LLAMA, MISTRAL)}  # in the order in which an export looks for one that fits

# Keys of config.json that do not change what the weights compute: identity, generation's defaults, training's, bookkeeping
PASSED_OVER = set("""
    model_type architectures auto_map name_or_path transformers_version dtype torch_dtype use_cache bos_token_id eos_token_id pad_token_id sep_token_id
    cls_token_id unk_token_id decoder_start_token_id tokenizer_class prefix task_specific_params problem_type finetuning_task id2label label2id num_labels
    return_dict use_return_dict output_past output_attentions output_hidden_states torchscript use_bfloat16 is_decoder initializer_range pretraining_tp
    is_llama_config n_ctx resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout gradient_checkpointing attn_implementation
    do_sample early_stopping length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beams num_beam_groups num_return_sequences
    diversity_penalty repetition_penalty encoder_no_repeat_ngram_size temperature top_k top_p typical_p chunk_size_feed_forward
    unsloth_fixed unsloth_version
    """.split())
LOOKED_AT = set("rope_theta rope_scaling rope_parameters sliding_window use_sliding_window max_window_layers layer_types".split())  # by rope's families

OLD_BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # causal masks and frequencies that old files hold


def layout(family: Family, config: ModelConfig) -> dict[str, list[tuple[str, tuple]]]:
    """{their name: [(name, shape) of ours that lie in it, one after the other]} of a model of this ModelConfig."""
    with torch.device("meta"):
        parameters = GPT(config).named_parameters()
    found = {}
    for name, p in parameters:
        rows = config.vocab_size if name in ("wte.weight", "head.weight") else p.size(0)  # padding stands for nothing elsewhere
        found.setdefault(family.their_name(name), []).append((name, (rows, *p.shape[1:])))
    return found


def stored_shape(family: Family, parts: list[tuple[str, tuple]]) -> tuple:
    """The shape in a file of tensors [(our name, shape)] that lie in it one after the other."""
    shape = (sum(s[0] for _, s in parts), *parts[0][1][1:])
    return shape[::-1] if family.flips(parts[0][0]) else shape


def make_sources(family: Family, config: ModelConfig, shapes: dict[str, tuple], read, where: str) -> dict[str, Any]:
    """{our name: (shape, function of a slice that reads those rows)} from tensors under a family's names.

    shapes: {their name: shape}; read(their name, slice, ...): part of a tensor. Names without what the family's begin with, as a model
    without its head has them, are completed. UserError that lists what is missing, left over, or of another shape.
    """
    layers = {m[1] for name in shapes if (m := re.search(r"(?:^|\.)(?:h|layers)\.(\d+)\.", name))}
    if config.n_layer > len(layers) + 1:  # one may be missing and is named below; a million are not built to be named
        raise UserError(f"{where} has tensors of {len(layers)} layers, its configuration says {config.n_layer:,}")
    first, stored = family.names["wte"].partition(".")[0] + ".", {}
    for name in shapes:
        if not OLD_BUFFERS.search(name):
            stored.setdefault(name if name.startswith((first, "lm_head.")) else first + name, []).append(name)
    wanted = layout(family, config)
    if config.tie_embeddings and "lm_head.weight" in stored:
        check_tied(stored.pop("lm_head.weight")[0], stored.get(family.their_name("wte.weight"), [None])[0], shapes, read, where)
    missing = [n for n in wanted if n not in stored]
    unexpected = [n for n, same in stored.items() if n not in wanted or len(same) > 1]
    wrong = [f"{n} of shape {tuple(shapes[stored[n][0]])} in place of {stored_shape(family, parts)}" for n, parts in wanted.items()
             if n in stored and tuple(shapes[stored[n][0]]) != stored_shape(family, parts)]
    problems = [f"{where} {verb} {several(names)}{rest}" for verb, names, rest in (
        ("lacks", missing, f", which a {family.model_type} of its configuration has"),
        ("has", unexpected, f", which a {family.model_type} of its configuration has no place for"),
        ("has", wrong, "")) if names]
    if problems:
        raise UserError(*problems)

    def rows_of(name, start, count, flip, rows):
        first, behind, _ = rows.indices(count)
        part = slice(start + first, start + behind)
        return read(name, slice(None), part).t() if flip else read(name, part)

    sources = {}
    for theirs, parts in wanted.items():
        start = 0
        for name, shape in parts:
            sources[name] = (shape, functools.partial(rows_of, stored[theirs][0], start, shape[0], family.flips(name)))
            start += shape[0]
    return sources


def several(names: list[str]) -> str:
    """Names in a message, 20 at most."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def check_tied(head: str, embedding: str | None, shapes: dict[str, tuple], read, where: str) -> None:
    """UserError where a file that calls its head tied to the embedding holds another one: which of the two counts is not for us to say."""
    if embedding is None:
        return  # said to be missing
    rows = shapes[head][0]
    same = shapes[head] == shapes[embedding] and all(
        torch.equal(read(head, slice(a, a + 4096)), read(embedding, slice(a, a + 4096))) for a in range(0, rows, 4096))
    if not same:
        raise UserError(f"{where} has tie_word_embeddings=true and an lm_head.weight other than its embedding: false in config.json keeps the two apart")


# ------------------------------------------------------------------------------------------------------- Hugging Face


def download(name: str, revision: str | None) -> str:
    """The folder of a Hugging Face model, from the hub or its cache; only weights, configuration and tokenizer."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.jinja", "*.safetensors"],
                                                 ignore_patterns=["*/*", "consolidated*"])  # the same weights again, for other programs
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        raise UserError(f"{name}{at} cannot be had from the Hugging Face hub and is not in its cache here ({type(error).__name__}); "
                        "with a network it would be fetched, a local folder of the model works without") from None


def of_huggingface(folder: str, say) -> Weights:
    """Weights of a Hugging Face folder: config.json and .safetensors files, one or several."""
    family, config = read_config(os.path.join(folder, "config.json"), say)
    files = SafetensorsFiles(folder)
    sources = make_sources(family, config, files.shapes, files.read, folder)
    tokenizer = load_tokenizer(os.path.join(folder, "tokenizer.json")) if os.path.isfile(os.path.join(folder, "tokenizer.json")) else None
    if tokenizer is None and family is GPT2 and config.vocab_size == 50257:
        tokenizer = gpt2_tokenizer()
    return Weights(folder, config, sources, tokenizer)


class SafetensorsFiles:
    """The tensors of a folder's safetensors files: model.safetensors, those of model.safetensors.index.json, or all there are."""

    def __init__(self, folder: str):
        self.folder, self.shapes, self.file = folder, {}, {}
        listed = {}
        if os.path.isfile(os.path.join(folder, "model.safetensors")):
            names = ["model.safetensors"]
        elif os.path.isfile(index := os.path.join(folder, "model.safetensors.index.json")):
            listed = self.read_index(index)
            names = sorted(set(listed.values()))
        else:
            names = sorted(os.path.basename(p) for p in glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
        for name in names:
            for tensor, (shape, dtype) in self.look_into(os.path.join(folder, name)).items():
                if dtype not in DTYPES:
                    raise UserError(f"{os.path.join(folder, name)} has {tensor} in {dtype}: weights in {', '.join(DTYPES)} can be read")
                if tensor in self.file:
                    raise UserError(f"{folder} has {tensor} both in {self.file[tensor]} and in {name}: keep the files of one model")
                self.shapes[tensor], self.file[tensor] = tuple(shape), name
        if elsewhere := [t for t, name in listed.items() if self.file.get(t) != name]:
            raise UserError(f"{folder} lacks {several(elsewhere)}, which model.safetensors.index.json names: fetch the files again")

    @staticmethod
    def read_index(path: str) -> dict[str, str]:
        try:
            listed = read_json(path).get("weight_map")
            if not isinstance(listed, dict) or not listed or not all(isinstance(n, str) and n == os.path.basename(n) != "" for n in listed.values()):
                raise ValueError("weight_map does not name files of its folder")
        except (OSError, ValueError) as error:
            raise refuse(path, "an index of safetensors files", error) from None
        return listed

    @staticmethod
    def look_into(path: str) -> dict[str, tuple]:
        try:
            with safe_open(path, "pt") as f:
                slices = {name: f.get_slice(name) for name in f.keys()}
                return {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise refuse(path, "a whole safetensors file", error) from None

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        """Part of a tensor, mapped from its file: only what is looked at is read, and the mapping goes when the tensor does."""
        with safe_open(os.path.join(self.folder, self.file[name]), "pt") as f:
            return f.get_slice(name)[slices]


def read_config(path: str, say) -> tuple[Family, ModelConfig]:
    """(family, ModelConfig) of a config.json; UserError, a sentence for each thing in it that this model does not compute."""
    try:
        c = read_json(path)
    except (OSError, ValueError) as error:
        raise refuse(path, "a model's configuration", error) from None
    family = FAMILIES.get(c.get("model_type")) if isinstance(c.get("model_type"), str) else None
    if family is None:
        raise UserError(f"{path} has model_type={reprlib.repr(c.get('model_type'))}: this version reads {', '.join(FAMILIES)}")
    if "auto_map" in c:
        say(f"note: {path} names code of its own (auto_map), which is not run: the model is read as a {family.model_type}")
    given, problems = {**family.defaults, **c}, []
    key, meanings = family.activation
    known = {*PASSED_OVER, *family.sizes, *family.only, *family.bias_keys, key, *(() if family is GPT2 else LOOKED_AT)}
    for name, value in c.items():  # what is off, or null, changes nothing
        if value and name not in known and not name.startswith("_") and "." not in name:
            problems.append(f"{name}={reprlib.repr(value)}, which is not known to leave a {family.model_type}'s computation as it is")
    for name, values in family.only.items():
        if name in given and given[name] not in values:
            problems.append(f"{name}={reprlib.repr(given[name])}, where this version computes {values[0]} alone")
    if not isinstance(given[key], str) or given[key] not in meanings:
        problems.append(f"{key}={reprlib.repr(given[key])}, where this version computes {', '.join(meanings)} alone")
    problems += [f"{name}={reprlib.repr(given[name])}, where true or false was expected" for name in family.bias_keys
                 if type(given.get(name, False)) is not bool]
    fields = read_sizes(family, given, problems)
    if family is not GPT2 and not problems:
        check_windows(family, given, fields, problems)
        fields |= read_rope(given, fields["block_size"], problems)
    if problems:
        raise UserError(*[f"{path} has {p}" for p in problems])
    switches = {name: values[0] for name, values in family.switches.items()}
    if "attention_bias" in family.bias_keys:
        switches["qkv_bias"] = switches["o_bias"] = given.get("attention_bias", False)
    if "mlp_bias" in family.bias_keys:
        switches["bias"] = given.get("mlp_bias", False)
    config = ModelConfig(**{**switches, **fields, "mlp": meanings[given[key]]})
    if found := config.problems():
        raise UserError(*[f"{path}: {p}" for p in found])
    return family, config


def read_sizes(family: Family, given: dict, problems: list[str]) -> dict:
    """{field of ModelConfig: value} of a configuration's sizes, each of its type and in bounds; what is not is added to problems."""
    types, fields = {f.name: f for f in dataclasses.fields(ModelConfig)}, {}
    for key, name in family.sizes.items():
        (kind, optional), value = expected_type(types[name]), given.get(key)
        if key not in given:
            problems.append(f"no {key}")
        elif kind is bool and type(value) is not bool:
            problems.append(f"{key}={reprlib.repr(value)}, where true or false was expected")
        elif kind is int and not (value is None and optional) and not (type(value) is int and 1 <= value <= LARGEST_SIZE):
            problems.append(f"{key}={reprlib.repr(value)}, where an integer from 1 to {LARGEST_SIZE:,} was expected")
        elif kind is float and not is_positive(value):
            problems.append(f"{key}={reprlib.repr(value)}, where a number above 0 was expected")
        else:
            fields[name] = float(value) if kind is float else value
    return fields


def is_positive(value: Any) -> bool:
    """Whether a value of a config.json is a number above 0 that a float holds."""
    return type(value) in (int, float) and 0 < value <= 1e12


def check_windows(family: Family, given: dict, fields: dict, problems: list[str]) -> None:
    """Adds to problems where a query would not see all earlier keys: windows that are in use, and shorter than the context."""
    kinds, window = given.get("layer_types"), given.get("sliding_window")
    if kinds is not None and kinds != ["full_attention"] * fields["n_layer"]:
        problems.append(f"layer_types={reprlib.repr(kinds)}, where this version computes full_attention in each of its {fields['n_layer']} layers")
    switched = "max_window_layers" in family.defaults  # Qwen's windows have a switch, and begin at a layer
    first = given.get("max_window_layers")
    off = switched and (not given.get("use_sliding_window") or kinds is not None or type(first) is int and first >= fields["n_layer"])
    if window is not None and not off and not (type(window) is int and window >= fields["block_size"]):
        problems.append(f"sliding_window={reprlib.repr(window)} in use, where this version computes attention to the whole context")


def read_rope(given: dict, context: int, problems: list[str]) -> dict:
    """ModelConfig's fields of the rotary embedding, from rope_parameters (transformers 5) or rope_scaling and rope_theta (4)."""
    old, new = given.get("rope_scaling"), given.get("rope_parameters")
    rope = old or new or {}
    if not isinstance(rope, dict) or old and new and old != new:
        problems.append(f"rope_scaling={reprlib.repr(old)} and rope_parameters={reprlib.repr(new)}, where one object was expected")
        return {}
    rope = {"rope_theta": given.get("rope_theta", 10000.0), **rope}
    kind = rope.pop("rope_type", rope.get("type", "default")) or "default"
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1) not in (1, None):
        problems.append("a partial_rotary_factor other than 1, where this version turns all of a head's channels")
    fields = {"rope_theta": rope.pop("rope_theta")}
    if not isinstance(kind, str) or kind not in ("default", *ROPE_KEYS):
        problems.append(f"rope scaling of the type {reprlib.repr(kind)}, where this version computes default, {', '.join(ROPE_KEYS)}")
        return {}
    keys = ROPE_KEYS.get(kind, {})
    if kind == "yarn":
        read_yarn(rope, problems)
    if "original_max_position_embeddings" in keys:
        rope.setdefault("original_max_position_embeddings", context)
    fields |= {name: rope.pop(key, None) for key, name in keys.items()}
    if kind == "yarn":  # what transformers takes where they are absent; without an attention_factor it follows from the factor, as ours
        fields["rope_beta_fast"], fields["rope_beta_slow"] = fields["rope_beta_fast"] or 32.0, fields["rope_beta_slow"] or 1.0
        if fields["rope_attention_factor"] is None:
            del fields["rope_attention_factor"]
    if any(rope.values()):
        problems.append(f"rope scaling with {', '.join(k for k, v in rope.items() if v)}, which the type {kind} does not have")
    if wrong := [f"{name} of {reprlib.repr(value)}" for name, value in fields.items() if not is_positive(value)]:
        problems.append(f"{', '.join(wrong)}, where a number above 0 was expected")
        return {}
    fields = {name: int(value) if name == "rope_original_context" else float(value) for name, value in fields.items()}
    return fields if kind == "default" else {**fields, "rope_scaling_type": kind}


def read_yarn(rope: dict, problems: list[str]) -> None:
    """Turns the two ways to say YaRN's attention_factor into one, in place; what only other versions of YaRN have is added to problems."""
    mscale, all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
    if rope.pop("truncate", True) not in (True, None):
        problems.append("rope scaling of the type yarn with truncate=false, where this version rounds the channels between which it passes over")
    if not mscale or not all_dim or rope.get("attention_factor") is not None:
        return
    if not all(is_positive(value) for value in (mscale, all_dim, rope.get("factor"))):
        problems.append(f"mscale={reprlib.repr(mscale)} and mscale_all_dim={reprlib.repr(all_dim)} with factor={reprlib.repr(rope.get('factor'))}, "
                        "where numbers above 0 were expected")
        return
    grown = math.log(max(1, rope["factor"]))
    rope["attention_factor"] = (0.1 * mscale * grown + 1) / (0.1 * all_dim * grown + 1)


# a type of rope scaling -> {its keys: fields of ModelConfig}
ROPE_KEYS = {
    "llama3": {"factor": "rope_scaling", "low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor",
               "original_max_position_embeddings": "rope_original_context"},
    "linear": {"factor": "rope_scaling"},
    "yarn": {"factor": "rope_scaling", "original_max_position_embeddings": "rope_original_context", "beta_fast": "rope_beta_fast",
             "beta_slow": "rope_beta_slow", "attention_factor": "rope_attention_factor"},
}


# ------------------------------------------------------------------------------------------------------------ nanoGPT

NANOGPT = dataclasses.replace(GPT2, model_type="nanoGPT", transposed=False)


def of_nanogpt(path: str) -> Weights:
    """Weights of a nanoGPT checkpoint, compiled (`_orig_mod.`) or not. A file that asks for more than tensors and plain values is refused."""
    try:
        saved = load_torch(path)
        args, state = saved["model_args"], {n.removeprefix("_orig_mod."): t for n, t in saved["model"].items()}
        args = {k: args[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout") if k in args}
        sizes = [args[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")]
        if not all(type(n) is int and 1 <= n <= LARGEST_SIZE for n in sizes) or type(args.get("bias", True)) is not bool:
            raise ValueError("model_args are not sizes")
        if type(args.get("dropout", 0.0)) not in (int, float):
            raise ValueError("model_args has a dropout that is no number")
        for name, t in state.items():
            if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.layout != torch.strided:
                raise ValueError(f"{name[:100]} is not a tensor of weights")
            if t.numel() * t.element_size() > t.untyped_storage().nbytes():
                raise ValueError(f"{name[:100]} claims more values than the file has")
        trained_on = saved.get("config")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except Exception as error:  # a damaged file can fail in any way
        raise refuse(path, "a nanoGPT checkpoint that can be read without running code in it", error) from None
    config = ModelConfig(**args, mlp="gelu")
    if found := config.problems():
        raise UserError(*[f"{path}: {p}" for p in found])
    sources = make_sources(NANOGPT, config, {n: tuple(t.shape) for n, t in state.items()}, lambda name, *slices: state[name][slices], path)
    return Weights(path, config, sources, nanogpt_tokenizer(path, trained_on, config.vocab_size))


def nanogpt_tokenizer(path: str, config: dict, vocab_size: int):
    """The tokenizer of the data set a nanoGPT checkpoint was trained on: beside it (DIR/data/NAME for DIR/out/ckpt.pt), or one
    prepared here; else GPT-2's where the vocabulary has its size; else None."""
    name = config.get("dataset") if isinstance(config, dict) else None
    name = name if isinstance(name, str) else ""
    beside = os.path.join(os.path.dirname(os.path.abspath(path)), "..", "data", name)
    for place in (beside, name) if name else ():
        try:
            folder = find_dataset(place, ROOT)
            identity = TokenDataset(folder, "train").tokenizer_identity
        except UserError:
            continue
        if identity and identity["vocab_size"] <= vocab_size:
            return tokenizer_from_identity(identity, folder)
    return gpt2_tokenizer() if vocab_size in (50257, 50304) else None


def gpt2_tokenizer():
    """GPT-2's, or None where its vocabulary cannot be had: weights are of use without."""
    try:
        return load_tokenizer("gpt2")
    except UserError:
        return None


# ------------------------------------------------------------------------------------------------- a larger vocabulary


def with_new_rows(sources: dict[str, Any], vocab_size: int, first_values: dict[str, Any]) -> dict[str, Any]:
    """sources for a model of a larger vocabulary, whose first_values() are given: rows from the weights' vocab_size on start from those."""
    def rows_of(read, fresh, rows):
        first, behind = rows.start, rows.stop
        parts = [read(slice(first, min(behind, vocab_size))).float()] if first < vocab_size else []
        parts += [fresh(slice(max(first, vocab_size), behind))] if behind > vocab_size else []
        return torch.cat(parts)

    grown = dict(sources)
    for name in {"wte.weight", "head.weight"} & set(sources):
        shape, fresh = first_values[name]
        grown[name] = (shape, functools.partial(rows_of, sources[name][1], fresh))
    return grown
