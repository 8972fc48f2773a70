"""Text from a checkpoint.

    python sample.py --out_dir=out/quickstart --start="import "
    python sample.py --init_from=ckpt.pt --start=FILE:prompt.txt --num_samples=3 --temperature=0.7
    python sample.py --init_from=Qwen/Qwen3-0.6B --chat
    python sample.py --init_from=Qwen/Qwen3-0.6B --prompts=questions.jsonl --out=answers.jsonl
    python sample.py --out_dir=out/run --export=DIR

--out_dir takes a run of ours or a nanoGPT folder, --init_from any weights: a run or checkpoint folder, a nanoGPT ckpt.pt, a
Hugging Face folder or name (NAME@REVISION) of GPT-2, Llama, Mistral, Qwen2 or Qwen3.

--prompts takes a text file with a prompt a line, or a .jsonl with {"prompt": "..."} to go on from or {"messages": [...]} to
answer by the model's chat template; a line of JSON comes out for each. --export writes no text but the weights, for transformers.
"""

import codecs
import contextlib
import importlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import torch

from engine import processes
from engine.checkpoint import fill
from engine.config import read_settings
from engine.errors import UserError, full_disk_told, run_as_script, tell
from engine.families import open_weights
from engine.packed import cache_dtype, packed_weights
from model import GPT, KVCache, complete, generate, random_stream


@dataclass
class Settings:
    """Every setting of sample.py."""

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
    chat: bool = False  # talk with the model, by its chat template
    system: str | None = None  # what it is told before a chat
    thinking: bool | None = None  # for templates that can leave thinking out, as Qwen3's (none: as the model was fine-tuned, else the template's own choice)
    prompts: str | None = None  # a file of prompts to answer in place of start
    out: str | None = None  # where the answers go (none: standard output)
    batch_size: int = 8  # of them, made at a time
    seed: int = 1337
    tokenizer: str | None = None  # for weights that do not say which (byte, gpt2, ..., a tokenizer.json)
    device: str = "auto"
    dtype: str = "auto"  # bfloat16: half of the bytes to read for each token, on a CPU too, where auto is float32
    compile: bool = False
    threads: int = 0
    backend: str = "auto"


def check(s):
    """UserError with a sentence for each setting that nothing can be made with."""
    problems = []
    for key, least in (("num_samples", 1), ("max_new_tokens", 1), ("temperature", 0), ("threads", 0), ("seed", 0), ("batch_size", 1)):
        if getattr(s, key) < least:
            problems.append(f"{key}={getattr(s, key)}: expected at least {least}")
    if s.top_k is not None and s.top_k < 1:
        problems.append(f"top_k={s.top_k}: expected at least 1 (the k likeliest tokens); --top_k=none takes all of them")
    if s.top_p is not None and not 0 < s.top_p <= 1:
        problems.append(f"top_p={s.top_p}: expected a probability above 0, 1 at most; --top_p=none takes all tokens")
    if s.dtype not in ("auto", "float32", "bfloat16", "float16"):
        problems.append(f"dtype={s.dtype}: expected one of auto, float32, bfloat16, float16")
    modes = [f"--{name}" for name in ("chat", "prompts", "start") if getattr(s, name)]
    if len(modes) > 1:
        problems.append(f"{' and '.join(modes)} were given: expected one of them")
    if s.system is not None and not s.chat:
        problems.append("system was given without --chat: records of --prompts hold their own system messages")
    if s.out is not None and s.prompts is None:
        problems.append(f"out={s.out} without --prompts: only their answers go to a file")
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


def known(model, tokenizer, ids):
    """The ids, if the model has an embedding for each."""
    if max(ids) >= model.config.vocab_size:
        raise UserError(f"the prompt has id {max(ids)} of the {tokenizer.name} tokenizer, the model's vocabulary ends at {model.config.vocab_size - 1}: "
                        "give the tokenizer it was trained with")
    return ids


def stream(model, tokenizer, text, device, count=1, write=sys.stdout.write, ids=None, **options):
    """Writes `count` samples that go on from `text`, the first as its tokens come; generate()'s options pass through. `ids` are the
    text's, where it is more than ordinary text."""
    ids = known(model, tokenizer, prompt_ids(tokenizer, text)) if ids is None else ids
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


# ---------------------------------------------------------------------------------------------------- many prompts, a file

WINDOW = 32  # batches whose prompts are put in order of length, so that what runs beside each other ends beside each other


def read_prompts(path):
    """Yields (where, {"prompt": str} or {"messages": [...]}, with whatever else the record holds) for each line of a file."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            for number, line in enumerate(f, 1):
                where = f"{path} line {number}"
                if not line.strip():
                    continue
                yield where, json_record(line, where) if path.endswith(".jsonl") else {"prompt": line.rstrip("\n")}
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it") from None
    except OSError as error:
        raise UserError(f"--prompts={path} cannot be read: {error.strerror}") from None


def json_record(line, where):
    """A line of a file of prompts: an object with prompt or messages; UserError where it is another."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise UserError(f'{where}: expected an object with either "prompt" or "messages", got {line.strip()[:100]}')
    if "prompt" in record and not isinstance(record["prompt"], str):
        raise UserError(f"{where}: expected the prompt to be text, got {json.dumps(record['prompt'])[:100]}")
    return record


def answer_prompts(model, tokenizer, s):
    """Writes a line of JSON for each prompt of s.prompts, in their order: the record itself with `answer`, `tokens` (how many it
    took) and `ended` (or cut off at max_new_tokens). An answer is what the prompt would get alone, whatever it is batched with."""
    template: Any = None  # a ChatTemplate, once one is needed

    def encode(where, record):
        nonlocal template
        if "prompt" in record:
            return known(model, tokenizer, prompt_ids(tokenizer, record["prompt"]))
        from data.chat import ChatTemplate
        template = template or ChatTemplate(tokenizer)
        try:
            return known(model, tokenizer, template.prompt(record["messages"], **variables(s, tokenizer)).ids)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    # all are read and encoded before the first is answered: a fault in the last line is told now
    prompts = [(record, encode(where, record)) for where, record in read_prompts(s.prompts)]
    if not prompts:
        raise UserError(f"{s.prompts} holds no prompts: expected a prompt a line, or JSON lines with \"prompt\" or \"messages\"")
    options = dict(max_new_tokens=s.max_new_tokens, batch_size=s.batch_size, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p,
                   seed=s.seed, samples=s.num_samples, vocab_size=min(model.config.vocab_size, tokenizer.vocab_size))
    with output(s.out) as write, packed_weights(model):
        for start in range(0, len(prompts), WINDOW * s.batch_size):
            window, answers = prompts[start:start + WINDOW * s.batch_size], {}
            for chat in (False, True):
                chosen = sorted((i for i, (record, _) in enumerate(window) if ("messages" in record) == chat), key=lambda i: len(window[i][1]))
                stops = template.stop_ids if chat and chosen else [tokenizer.eot_id] if s.stop else []
                for n, j, ids in complete(model, [window[i][1] for i in chosen], stop_token=stops, **options):
                    ended = ids[-1] in stops
                    answers[chosen[n], j] = {"answer": tokenizer.decode(ids[:-1] if ended else ids), "tokens": len(ids), "ended": ended}
            for i, j in sorted(answers):
                sample = {"sample": j} if s.num_samples > 1 else {}
                write(json.dumps({**window[i][0], **sample, **answers[i, j]}, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def output(path):
    """A function that writes text to a file, or to standard output, and what it has written is there at once."""
    if path is None:
        yield lambda text: print(text, end="", flush=True)
        return
    try:
        file = open(path, "w", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"--out={path} cannot be written: {error.strerror}") from None
    with full_disk_told(path), file:
        yield lambda text: print(text, end="", flush=True, file=file)


# ------------------------------------------------------------------------------------------------------------------- chat


def variables(s, tokenizer):
    """What a chat template is told besides the messages."""
    thinking = False if s.thinking is None and tokenizer.without_thinking else s.thinking
    return {} if thinking is None else {"enable_thinking": thinking}


class Conversation:
    """A talk with a model, and the KV cache of what has been said: of a turn only what is new is computed."""

    def __init__(self, model, tokenizer, s):
        from data.chat import ChatTemplate

        self.model, self.tokenizer, self.s, self.template = model, tokenizer, s, ChatTemplate(tokenizer)
        self.device = model.wte.weight.device
        self.cache = KVCache(model, 1, 0, cache_dtype(model), self.device)
        self.ids, self.text = [], ""  # all that was given to the model and picked from it; the cache holds the first of them
        self.messages = [{"role": "system", "content": s.system}] if s.system else []
        self.random = random_stream(s.seed, 0)
        self.notes = []  # sentences about the context, for the person

    def answer(self, question):
        """Yields the answer to a message as its text comes. Closed early, it leaves what was said until then."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": question})
        try:
            text, ids = self.fitting_prompt()
        except UserError:
            self.messages, self.notes = before, []
            raise
        pairs = zip(self.ids[:self.cache.length], ids[:-1])
        # behind the first difference the template has changed what was said before
        self.cache.length = next((i for i, (old, new) in enumerate(pairs) if old != new), min(self.cache.length, len(ids) - 1))
        size, stops = self.model.config.block_size, set(self.template.stop_ids)
        most = min(self.s.max_new_tokens, size - len(ids))
        if self.cache.size < len(ids) + most:  # twice as large each time: a long talk copies little, a short one holds little
            self.cache.grow(min(size, max(len(ids) + most, 2 * self.cache.size)))
        steps = generate(self.model, torch.tensor([ids], device=self.device), most, self.s.temperature, self.s.top_k, self.s.top_p, stops,
                         cache=self.cache, streams=[self.random], vocab_size=min(self.model.config.vocab_size, self.tokenizer.vocab_size))
        self.ids, prompt_length, said = list(ids), len(ids), []
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            for new in steps:
                self.ids.append(new.item())
                if self.ids[-1] not in stops:
                    said.append(self.ids[-1])
                    yield decoder.decode(self.tokenizer.decode_bytes(said[-1:]))
            yield decoder.decode(b"", final=True)
            if len(self.ids) == size:
                self.notes.append(f"the context of {size:,} tokens is full: the answer ends here")
        finally:
            steps.close()
            answer = self.tokenizer.decode(said)
            self.messages.append({"role": "assistant", "content": answer})
            self.text = text + answer + self.tokenizer.decode(self.ids[prompt_length + len(said):])

    def fitting_prompt(self):
        """(text, ids) of the conversation with room for an answer; the oldest turns are dropped where it has grown too long."""
        size = self.model.config.block_size
        room = min(self.s.max_new_tokens, max(1, size // 4))
        while True:
            text, ids = self.prompt()
            if len(ids) + room <= size:
                return text, known(self.model, self.tokenizer, ids)
            users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
            if len(users) == 1:
                raise UserError(f"a message of {len(ids):,} tokens with what belongs to it does not fit the context of {size:,} tokens beside "
                                f"an answer of {room:,}: write a shorter one")
            del self.messages[users[0]:users[1]]
            self.notes.append(f"the context of {size:,} tokens is full: the oldest turn is forgotten")

    def prompt(self):
        """(text, ids) of the conversation as the model is given it. Where it goes on from what was said, that keeps the ids that the
        model picked, which need not be those that its text would be given."""
        layout = self.template.lay_out(self.messages, True, None, variables(self.s, self.tokenizer))
        done = len(self.text)
        if not done or not layout.text.startswith(self.text):
            rendered = self.template.prompt(self.messages, **variables(self.s, self.tokenizer))
            return rendered.text, rendered.ids
        # from the token on that ended the turn: some tokenizers take a space or newline that follows into it
        start = next((a for a, b in layout.controls if b == done), done)
        rest = self.template.encode(layout.text[start:], [(a - start, b - start) for a, b in layout.controls if a >= start])
        return layout.text, self.ids + rest[start < done:]


def chat(model, tokenizer, s, path):
    """Talks in the terminal until Ctrl-D or /exit. Ctrl-C stops an answer."""
    talk = Conversation(model, tokenizer, s)
    answering = stopped = False

    def interrupt(*_):
        nonlocal stopped
        if not answering:
            raise KeyboardInterrupt
        stopped = True

    def note(sentence):
        print(f"({sentence})", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, interrupt)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() edits lines by it
    if talk.template.end_of_turn is None:
        note(f"the {tokenizer.name} tokenizer has no token that ends a turn: answers end with the text or after {s.max_new_tokens} tokens")
    note(f"{path}; Ctrl-C stops an answer, Ctrl-D or /exit leaves")
    with packed_weights(model):
        while True:
            try:
                question = input("> ").strip()
                if question == "/exit":
                    return
                if not question:
                    continue
                answering, stopped = True, False
                with contextlib.closing(talk.answer(question)) as pieces:
                    for piece in pieces:
                        print(piece, end="", flush=True)
                        if stopped:
                            break
                print(flush=True)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                note("Ctrl-D or /exit leaves")
            except UserError as error:
                tell(error)
            finally:
                answering = False
            while talk.notes:
                note(talk.notes.pop(0))


def load_model(weights, device):
    """A GPT on `device` with the weights found, ready to sample."""
    with torch.device(device):
        model = GPT(weights.model_config)
    parameters = dict(model.named_parameters())
    fill(processes.Place(device=device), parameters, parameters, weights.sources, weights.path)
    return model.eval()


def main(argv):
    """The command line; returns an exit code."""
    s = Settings()
    if {"--help", "-h"} & set(argv):
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
        processes.compile_blocks(model, device, lambda sentence: print(sentence, file=sys.stderr))
    with precision.context(device.type):
        try:
            if s.chat:
                chat(model, tokenizer, s, weights.path)
            elif s.prompts:
                answer_prompts(model, tokenizer, s)
            else:
                stream(model, tokenizer, text, device, s.num_samples, max_new_tokens=s.max_new_tokens, temperature=s.temperature,
                       top_k=s.top_k, top_p=s.top_p, stop_token=tokenizer.eot_id if s.stop else None, seed=s.seed)
        except FloatingPointError as error:
            print(f"\nerror: {weights.path}: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
