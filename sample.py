"""Text from a checkpoint.

    python sample.py --out_dir=out/quickstart --start="import "
    python sample.py --init_from=ckpt.pt --start=FILE:prompt.txt --num_samples=3 --temperature=0.7
    python sample.py --out_dir=out/run --export=DIR

--out_dir takes a run of ours or a nanoGPT folder, --init_from any weights: a run or checkpoint folder, a nanoGPT ckpt.pt, a
Hugging Face folder or name (NAME@REVISION) of GPT-2, Llama, Mistral, Qwen2 or Qwen3. --export writes no text but the weights, for transformers.
"""

import codecs
import os
import sys
from dataclasses import dataclass

import torch

from engine import processes
from engine.checkpoint import fill
from engine.config import read_settings
from engine.errors import UserError, run_as_script
from engine.families import open_weights
from model import GPT, generate


@dataclass
class Settings:
    out_dir: str = "out/quickstart"  # a run's folder; its newest checkpoint is taken
    init_from: str | None = None  # other weights in place of out_dir
    start: str = ""  # the prompt, FILE:path for a file's text in UTF-8; empty: from end-of-text
    num_samples: int = 1  # made together, as one batch
    max_new_tokens: int = 500
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int | None = 200  # only the k likeliest tokens (none: all)
    top_p: float | None = None  # only the likeliest tokens that make up this probability
    export: str | None = None  # write the weights and the tokenizer into this new folder, in Hugging Face's layout
    stop: bool = False  # end a sample at its first end-of-text token
    seed: int = 1337
    tokenizer: str | None = None  # for weights that do not say which (byte, gpt2, ..., a tokenizer.json)
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    threads: int = 0
    backend: str = "auto"


def check(s):
    problems = []
    for key, least in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("threads", 0), ("seed", 0)):
        if getattr(s, key) < least:
            problems.append(f"{key}={getattr(s, key)}: expected at least {least}")
    if s.top_k is not None and s.top_k < 1:
        problems.append(f"top_k={s.top_k}: expected at least 1 (the k likeliest tokens); --top_k=none takes all of them")
    if s.top_p is not None and not 0 < s.top_p <= 1:
        problems.append(f"top_p={s.top_p}: expected a probability above 0, 1 at most; --top_p=none takes all tokens")
    if s.dtype not in ("auto", "float32", "bfloat16", "float16"):
        problems.append(f"dtype={s.dtype}: expected one of auto, float32, bfloat16, float16")
    if problems:
        raise UserError(*problems)


def read_prompt(start):
    """The prompt's text: `start` itself, or the UTF-8 content of PATH for FILE:PATH, whatever the locale."""
    if not start.startswith("FILE:"):
        return start
    path = start.removeprefix("FILE:")
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it, or give the text itself") from None
    except OSError as error:
        raise UserError(f"--start=FILE:{path} cannot be read: {error.strerror}") from None


def prompt_ids(tokenizer, text):
    """Token ids of a prompt. An empty one starts from end-of-text, or from a line's start where the tokenizer has none."""
    ids = list(tokenizer.encode(text))
    if ids:
        return ids
    return [tokenizer.eot_id] if tokenizer.eot_id is not None else list(tokenizer.encode("\n"))


def stream(model, tokenizer, text, device, count=1, write=sys.stdout.write, **options):
    """Writes `count` samples that go on from `text`, the first as its tokens come; generate()'s options pass through."""
    ids = prompt_ids(tokenizer, text)
    if max(ids) >= model.config.vocab_size:
        raise UserError(f"the prompt has id {max(ids)} of the {tokenizer.name} tokenizer, the model's vocabulary ends at {model.config.vocab_size - 1}: "
                        "give the tokenizer it was trained with")
    tokens = torch.tensor([ids] * count, device=device)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character's bytes may come in several tokens
    write(text)
    rows, stop = [], options.get("stop_token")
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    for new in generate(model, tokens, vocab_size=vocab_size, **options):
        row = new.tolist()
        rows.append(row)
        if stop is not None and len(rows) > 1 and rows[-2][0] == stop:
            continue
        write(decoder.decode(tokenizer.decode_bytes(row[:1])))
        sys.stdout.flush()
    write(decoder.decode(b"", final=True) + "\n")
    for sample in list(zip(*rows))[1:]:
        if stop in sample:  # a text that ended waits for the others, end-of-text upon end-of-text
            sample = sample[:sample.index(stop) + 1]
        write("---------------\n" + text + tokenizer.decode(sample) + "\n")


def load_model(weights, device):
    """A GPT on `device` with the weights found, ready to sample."""
    with torch.device(device):
        model = GPT(weights.model_config)
    parameters = dict(model.named_parameters())
    fill(processes.Place(device=device), parameters, parameters, weights.sources, weights.path)
    return model.eval()


def main(argv):
    s = Settings()
    if "--help" in argv:
        import inspect
        print(__doc__, inspect.getsource(Settings), sep="\n")
        return 0
    read_settings(s, argv)
    check(s)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    text = read_prompt(s.start)
    where = s.init_from if s.init_from not in (None, "resume") else s.out_dir
    if not os.path.exists(where) and where == s.out_dir:
        raise UserError(f"there is no run in {where}: train one (python train.py), or give --out_dir or --init_from")
    weights = open_weights(where, say=lambda sentence: print(sentence, file=sys.stderr))
    tokenizer = weights.tokenizer
    if s.tokenizer:
        from data.tokenizers import load_tokenizer
        tokenizer = load_tokenizer(s.tokenizer)
    if s.export is not None:
        from engine.export import export
        return export(weights, tokenizer, s.export, print, s.dtype)
    if tokenizer is None:
        raise UserError(f"{weights.path} does not say which tokenizer it was trained with: give --tokenizer=gpt2, byte or a tokenizer.json")
    device, precision = processes.use_device(s)
    model = load_model(weights, device)
    if s.compile:
        processes.compile_blocks(model, device, print)
    with precision.context(device.type):
        try:
            stream(model, tokenizer, text, device, s.num_samples, max_new_tokens=s.max_new_tokens, temperature=s.temperature,
                   top_k=s.top_k, top_p=s.top_p, stop_token=tokenizer.eot_id if s.stop else None, seed=s.seed)
        except FloatingPointError as error:
            print(f"\nerror: {weights.path}: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
