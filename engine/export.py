"""Weights on their way out: a folder in Hugging Face's layout, from any checkpoint, complete or absent.

    DIR/config.json  generation_config.json  tokenizer.json  tokenizer_config.json
        model.safetensors, or model-00001-of-00002.safetensors ... and model.safetensors.index.json

Tensors go one at a time from the files that hold them into the file that is written, so memory is that of the largest one.
"""

import dataclasses
import math
import os
import shutil
from typing import Any

import torch

from data.shards import sync_folder
from data.tokenizers import byte_letters
from engine.checkpoint import pieces, write_json, write_safetensors
from engine.errors import UserError, full_disk_told
from engine.families import FAMILIES, GPT2, ROPE_KEYS, Family, Weights, layout, stored_shape
from model import ModelConfig

SHARD_BYTES = 5_000_000_000  # of a file; a model above it is written in several
START_OF_TEXT = ("<|begin_of_text|>", "<s>", "<bos>")  # what tokenizers call the token before a document, where they have one


def export(weights: Weights, tokenizer, folder: str, say, dtype: str = "auto") -> None:
    """Writes Weights (engine/families.py) and their tokenizer as a Hugging Face folder.

    dtype: auto (as they are stored), or what they are written in. UserError where a switch of the model fits no family, or the
    folder is in use; then, and where the disk is full, nothing is left behind.
    """
    folder = os.path.abspath(folder)
    if os.path.lexists(folder) and not (os.path.isdir(folder) and not os.listdir(folder)):
        raise UserError(f"--export={folder} exists and is not an empty folder: give another, or move it away")
    family, config = find_family(weights.model_config)
    partial = os.path.join(os.path.dirname(folder), f".{os.path.basename(folder)}.partial")
    try:
        with full_disk_told(folder):
            shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
            os.makedirs(partial)
            total, written = write_tensors(partial, family, config, weights.sources, None if dtype == "auto" else getattr(torch, dtype))
            write_json(os.path.join(partial, "config.json"), {**config_json(family, config, tokenizer), "torch_dtype": written})
            write_json(os.path.join(partial, "generation_config.json"), {**token_ids(tokenizer), **turn_ends(tokenizer)})
            if tokenizer:
                write_tokenizer(partial, tokenizer, config.block_size, say)
            sync_folder(partial)
            os.rename(partial, folder)
            sync_folder(os.path.dirname(folder))
    except OSError as error:
        raise UserError(f"--export={folder} cannot be written: {error.strerror}: {error.filename}; give another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"exported {weights.path} as {family.architecture}, {total:,} bytes of {written}, to {folder}"
        + ("" if tokenizer else "; without a tokenizer, since nothing says which one it was trained with"))


# ------------------------------------------------------------------------------------------------------ configuration


def find_family(config: ModelConfig) -> tuple[Family, ModelConfig]:
    """(family, ModelConfig as the family has it) for a model; UserError that names the switches where none fits.

    Biases that the family has and the model lacks are written as zeros, which changes nothing.
    """
    misfits = []
    for family in FAMILIES.values():
        wrong = [name for name, values in family.switches.items() if getattr(config, name) not in values]
        if family is GPT2:
            wrong += [name for name, other in (("n_kv_head", config.n_head), ("head_dim", config.n_embd / config.n_head)) if getattr(config, name) != other]
        elif family.model_type == "llama" and config.n_embd % config.n_head:
            wrong.append("head_dim")  # its configuration insists on the division
        if not wrong:
            biases: dict[str, Any] = {"bias": True, "qkv_bias": True, "o_bias": True} if family is GPT2 else {}
            if "attention_bias" in family.bias_keys:
                biases["qkv_bias"] = biases["o_bias"] = config.qkv_bias or config.o_bias
            return family, dataclasses.replace(config, **biases)
        misfits.append((family, wrong))
    family, wrong = min(misfits, key=lambda pair: len(pair[1]))
    there = ", ".join(f"{name}={getattr(config, name)}" for name in wrong)
    raise UserError(f"a model with {there} fits no family of Hugging Face that this version writes ({', '.join(FAMILIES)}): {family.model_type} "
                    f"comes nearest, but has no such {' and '.join(wrong)}; our own checkpoints hold any model")


def config_json(family: Family, config: ModelConfig, tokenizer) -> dict:
    """config.json of a model, in keys that transformers 4 and 5 both read."""
    key, meanings = family.activation
    found = {"architectures": [family.architecture], "model_type": family.model_type,
             **{theirs: getattr(config, ours) for theirs, ours in family.sizes.items()},
             key: next(theirs for theirs, ours in meanings.items() if ours == config.mlp)}
    if "attention_bias" in family.bias_keys:
        found["attention_bias"] = config.qkv_bias
    if "mlp_bias" in family.bias_keys:
        found["mlp_bias"] = config.bias
    if family is GPT2:
        found |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
    else:
        kind, scaling = config.rope_scaling_type, None
        if config.rope_scaling is not None:
            scaling = {"rope_type": kind, **{theirs: value for theirs, ours in ROPE_KEYS[kind].items() if (value := getattr(config, ours)) is not None}}
        found |= {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    if "sliding_window" in family.defaults:
        found["sliding_window"] = None
    return {**found, "initializer_range": 0.02, "use_cache": True, **token_ids(tokenizer)}


def token_ids(tokenizer) -> dict[str, int | None]:
    """bos and eos: a tokenizer without a token of its own for a document's start begins with the one that ends the document before."""
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    start = next((tokenizer.special_tokens[t] for t in START_OF_TEXT if t in tokenizer.special_tokens), tokenizer.eot_id)
    return {"bos_token_id": start, "eos_token_id": tokenizer.eot_id}


def turn_ends(tokenizer) -> dict[str, list[int]]:
    """What a model that talks in ChatML, for want of a template of its own, stops at besides the end of a text."""
    if not speaks_chatml(tokenizer):
        return {}
    stops = [tokenizer.eot_id, tokenizer.controls["<|im_end|>"]]
    return {"eos_token_id": sorted({stop for stop in stops if stop is not None})}


def speaks_chatml(tokenizer) -> bool:
    """Whether a Tokenizer has ChatML's tokens and no template of its own."""
    from data.chat import CHATML_TOKENS

    return tokenizer is not None and not tokenizer.chat_template and set(CHATML_TOKENS) <= tokenizer.controls.keys()


# ------------------------------------------------------------------------------------------------------------ tensors


def write_tensors(folder: str, family: Family, config: ModelConfig, sources: dict, dtype: torch.dtype | None) -> tuple[int, str]:
    """Writes the weights in one file, or in several and their index; returns (bytes, the embedding's dtype as config.json names it)."""
    parts, described = layout(family, config), {}
    for name, ours in parts.items():
        present = [n for n, _ in ours if n in sources]
        stored = sources[present[0]][1](slice(0, 0)).dtype if present else torch.float32  # a bias of zeros
        described[name] = (dtype or stored, stored_shape(family, ours))
    sizes = {name: math.prod(shape) * kind.itemsize for name, (kind, shape) in described.items()}
    shards, filled = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size

    def read(name):
        tensors = [sources[n][1](slice(0, shape[0])) if n in sources else torch.zeros(shape) for n, shape in parts[name]]
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return (whole.t() if family.flips(parts[name][0][0]) else whole).to(described[name][0])

    files = ["model.safetensors"] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards):
        tensors = {n: torch.empty(described[n][1], dtype=described[n][0], device="meta") for n in names}
        name_of = {t: n for n, t in tensors.items()}
        write_safetensors(os.path.join(folder, file), tensors, lambda t: pieces(read(name_of[t])), metadata={"format": "pt"})  # noqa: B023
    if len(files) > 1:
        where = {n: file for file, names in zip(files, shards) for n in names}
        write_json(os.path.join(folder, "model.safetensors.index.json"), {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})
    return sum(sizes.values()), str(next(iter(described.values()))[0]).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------- tokenizer


def write_tokenizer(folder: str, tokenizer, context: int, say) -> None:
    """tokenizer.json and tokenizer_config.json: the same ids and the same text from the tokenizers package as from ours."""
    if tokenizer.kind == "json":
        tokenizer.save(folder)
    elif (engine := as_engine(tokenizer)) is None:
        say(f"note: no tokenizer is written: {tokenizer.name} is tiktoken's, and only GPT-2's is known to split words alike elsewhere")
        return
    else:
        engine.save(os.path.join(folder, "tokenizer.json"))
    if speaks_chatml(tokenizer):
        from data.chat import CHATML

        with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(CHATML)
    path = os.path.join(folder, "tokenizer_config.json")
    if not os.path.exists(path):
        names = {i: text for text, i in tokenizer.special_tokens.items()}
        tokens = {key.removesuffix("_id"): names[i] for key, i in token_ids(tokenizer).items() if i in names}
        write_json(path, {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "clean_up_tokenization_spaces": False, **tokens})


def as_engine(tokenizer):
    """A tokenizers.Tokenizer that does what a byte, char or GPT-2 tokenizer of ours does, or None for tiktoken's others."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ordinary = [t for i, t in enumerate(tokenizer.token_bytes) if i not in tokenizer.special_tokens.values()]
    if tokenizer.kind == "char":
        try:
            vocabulary = {t.decode(): i for i, t in enumerate(ordinary)}
        except UnicodeDecodeError:
            raise UserError("its char tokenizer has half of a surrogate pair among its characters, which a tokenizer.json cannot hold: "
                            "prepare the data again without it") from None
        engine = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))  # not in the vocabulary: an unknown character is an error, as ours
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        engine.decoder = decoders.Fuse()
    elif tokenizer.kind == "byte" or tokenizer.name in ("gpt2", "r50k_base"):
        letters = byte_letters()
        spelled = {t: "".join(letters[b] for b in t) for t in ordinary}
        merges = [(spelled[a], spelled[b]) for a, b in merges_of(ordinary)]
        engine = Tokenizer(models.BPE({text: i for i, text in enumerate(spelled.values())}, merges))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=tokenizer.kind != "byte")
        engine.decoder = decoders.ByteLevel()
    else:
        return None
    engine.add_special_tokens([AddedToken(t, normalized=False) for t, _ in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])])
    return engine


def merges_of(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The merges of a byte-pair encoding from its tokens, bytes in the order in which training found them: each is the merge of the two that the
    earlier ones leave of it."""
    rank, found = {t: i for i, t in enumerate(tokens)}, []
    for token, own in rank.items():
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best, at = min((rank.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1))
            if best >= own:
                raise ValueError(f"{token!r} is no merge of earlier tokens")
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found
