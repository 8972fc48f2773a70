"""Weights from elsewhere: nanoGPT's ckpt.pt and Hugging Face's GPT-2, under this project's names. Nothing is unpickled."""

import functools
import glob
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data.tokenizers import load_tokenizer, tokenizer_from_identity
from data.shards import TokenDataset, find_dataset
from engine.checkpoint import Checkpoint, list_steps, newest_complete, open_checkpoint
from engine.config import ROOT, nearest
from engine.errors import UserError
from model import ModelConfig

GPT2_NAMES = {"gpt2": "openai-community/gpt2", "gpt2-medium": "openai-community/gpt2-medium",
              "gpt2-large": "openai-community/gpt2-large", "gpt2-xl": "openai-community/gpt2-xl"}


@dataclass
class Weights:
    """A model found somewhere: its architecture, its tensors by our names, read when called for."""

    path: str
    model_config: ModelConfig
    sources: dict[str, Any]  # name -> (shape, function of a slice that reads those rows), for checkpoint.fill
    tokenizer: Any  # None where nothing says which one it was trained with
    checkpoint: Checkpoint | None = None  # where it is one of ours, which has an optimizer's state too


def open_weights(where, say=print):
    """The Weights at `where`: a run folder (its newest checkpoint), one of its checkpoints, a nanoGPT ckpt.pt or its folder, a
    Hugging Face folder or name. UserError, a sentence, where there is none that can be read."""
    if os.path.isfile(os.path.join(where, "manifest.json")):
        return of_checkpoint(open_checkpoint(where))
    if list_steps(where):
        return of_checkpoint(newest_complete(where, say))
    if where.endswith(".pt") or os.path.isfile(os.path.join(where, "ckpt.pt")):
        return of_nanogpt(where if where.endswith(".pt") else os.path.join(where, "ckpt.pt"))
    if os.path.isfile(os.path.join(where, "config.json")) and glob.glob(os.path.join(where, "*.safetensors")):
        return of_gpt2(where)
    if os.path.exists(where):
        raise UserError(f"{where} holds no weights: expected a run or checkpoint folder, a nanoGPT ckpt.pt, or a Hugging Face "
                        "folder with config.json and .safetensors files")
    if where in GPT2_NAMES or where.count("/") == 1 and not where.startswith((".", "/", "out/")):
        return of_gpt2(download(GPT2_NAMES.get(where, where)))
    raise UserError(f"there is nothing at {where}{nearest(where, list(GPT2_NAMES))}")


def of_checkpoint(checkpoint):
    return Weights(checkpoint.path, checkpoint.model_config(), checkpoint.sources("model"), checkpoint.tokenizer(), checkpoint)


# ------------------------------------------------------------------------------------------------------------ nanoGPT

# nanoGPT's name of a module -> ours; q, k and v are one matrix there
GPT2_MODULES = {"wte": "wte", "wpe": "wpe", "ln_f": "norm", "ln_1": "norm1", "ln_2": "norm2", "attn.c_proj": "attn.o",
                "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}


def rename_gpt2(shapes, read, n_embd, transposed):
    """{our name: (shape, function of a slice that reads those rows)} for GPT-2's names, as OpenAI, Hugging Face and nanoGPT share
    them; shapes: {their name: shape}, read: their name -> tensor.

    `transposed`: matrices of the blocks are stored (in, out), as OpenAI's. Names without a place come back as they are,
    so that they are seen as unexpected; the causal masks that old files hold as buffers are passed over.
    """
    found = {}
    for name, shape in shapes.items():
        words = name.removeprefix("transformer.").split(".")
        if words[-1] == "masked_bias" or words[-2:] == ["attn", "bias"] or name == "lm_head.weight":  # the head is tied
            continue
        layer = f"blocks.{words[1]}." if words[0] == "h" and len(words) > 2 else ""
        module, kind = ".".join(words[2 if layer else 0:-1]), words[-1]
        flip = transposed and kind == "weight" and ("attn" in module or "mlp" in module)
        shape = tuple(reversed(shape)) if flip else tuple(shape)

        def rows(rows, name=name, flip=flip, start=0, stop=None):
            return (read(name).t() if flip else read(name))[start:stop][rows]

        if module == "attn.c_attn":
            for i, part in enumerate("qkv"):
                found[f"{layer}attn.{part}.{kind}"] = ((n_embd, *shape[1:]), functools.partial(rows, start=i * n_embd, stop=(i + 1) * n_embd))
        else:
            found[f"{layer}{GPT2_MODULES[module]}.{kind}" if module in GPT2_MODULES else name] = (shape, rows)
    return found


def of_nanogpt(path):
    """Weights of a nanoGPT checkpoint, compiled (`_orig_mod.`) or not. The restricted unpickler of torch.load builds tensors and
    plain values alone; a file that asks for anything else is refused."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        args, state = saved["model_args"], {n.removeprefix("_orig_mod."): t for n, t in saved["model"].items()}
        if not all(isinstance(t, torch.Tensor) for t in state.values()) or not all(type(args[k]) is int for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")):
            raise ValueError("model is not tensors, or model_args not numbers")
        trained_on = saved.get("config") or {}
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except Exception as error:
        raise UserError(f"{path} is not a nanoGPT checkpoint that can be read without running code in it: "
                        f"{type(error).__name__}: {str(error).splitlines()[0]}") from None
    config = ModelConfig(**{k: args[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout") if k in args},
                         mlp="gelu")
    sources = rename_gpt2({n: t.shape for n, t in state.items()}, state.__getitem__, config.n_embd, transposed=False)
    return Weights(path, config, sources, nanogpt_tokenizer(path, trained_on, config.vocab_size))


def nanogpt_tokenizer(path, config, vocab_size):
    """The tokenizer of the data set a nanoGPT checkpoint was trained on: beside it (DIR/data/NAME for DIR/out/ckpt.pt), or one
    prepared here; else GPT-2's where the vocabulary has its size; else None."""
    name = str(config.get("dataset") or "")
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


# ------------------------------------------------------------------------------------------------------- Hugging Face


def download(name):
    """The folder of a Hugging Face model, from the hub or its cache; only weights, configuration and tokenizer."""
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:
        raise UserError(f"{name} cannot be had from the Hugging Face hub and is not in its cache here ({type(error).__name__}); "
                        "with a network it would be fetched, a local folder of the model works without") from None


def of_gpt2(folder):
    """Weights of a Hugging Face GPT-2: config.json and .safetensors files, one or several."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            c = json.load(f)
        missing = [k for k in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd", "layer_norm_epsilon") if k not in c]
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder}/config.json is not a model's configuration: {error}") from None
    if c.get("model_type") == "gpt2" and missing:
        raise UserError(f"{folder}/config.json lacks {', '.join(missing)}")
    expected = {"model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "tie_word_embeddings": True}
    for key, value in expected.items():
        if c.get(key, value if key != "model_type" else None) != value:
            raise UserError(f"{folder}/config.json has {key}={c.get(key)!r}: this version reads GPT-2 with {key}={value!r}")
    config = ModelConfig(block_size=c["n_positions"], vocab_size=c["vocab_size"], n_layer=c["n_layer"], n_head=c["n_head"], n_embd=c["n_embd"],
                         mlp_hidden=c.get("n_inner"), bias=True, norm_eps=c["layer_norm_epsilon"], mlp="gelu_tanh")
    files = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        try:
            opened = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file: {error}") from None
        files.update({name: opened for name in opened.keys()})
    shapes = {name: opened.get_slice(name).get_shape() for name, opened in files.items()}
    sources = rename_gpt2(shapes, lambda n: files[n].get_tensor(n), config.n_embd, transposed=True)
    tokenizer = load_tokenizer(folder) if os.path.isfile(os.path.join(folder, "tokenizer.json")) else None
    if tokenizer is None and config.vocab_size == 50257:
        tokenizer = gpt2_tokenizer()
    return Weights(folder, config, sources, tokenizer)
