"""Text to ids and back: bytes, characters, tiktoken's encodings and any tokenizer.json, behind one small class."""

import difflib
import functools
import hashlib
import json
import os
import re
from typing import Any

import numpy as np

from engine.errors import UserError
from engine.untrusted import read_bounded, read_plain_pickle, refuse

LARGEST_VOCABULARY = 1 << 22  # ids of a tokenizer.json: the largest known has a sixteenth of them
LARGEST_FILE = 300_000_000  # bytes of a tokenizer.json: the largest known has a tenth

# What tokenizers call the token between documents. It is preferred to a chat model's end of turn: a
# tokenizer_config.json of Qwen3 names <|im_end|> as its eos_token, but documents end with <|endoftext|>.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|eos|>", "<EOS>",
               "[EOS]")


class Tokenizer:
    """Text to ids and back; ids are 0 .. vocab_size - 1.

    kind is "byte", "char", "tiktoken" or "json", name says which one of its kind. token_bytes holds the bytes of every
    id, None where an encoding leaves an id unused. special_tokens maps the control tokens to their ids, and eot_id is
    the one that ends a document (None where there is none). encode_numpy(text) gives an integer array; a text that
    spells a control token stays ordinary text. controls maps all that a chat template may write to their ids: besides
    special_tokens, added tokens that are not marked as special but stand in brackets, as Qwen3's <think>. added names those
    that with_controls() put behind the ids of a tokenizer that its kind and name describe.

    files: {name: text} of what it was read from, for save(). chat_template (None where it has none) and named_tokens
    ({"eos_token": ...}) are what its configuration says. without_thinking: the model whose checkpoint it came with was trained on answers
    that its template leaves thinking out of, and is to be asked for such.
    """

    def __init__(self, kind, name, token_bytes, encode_numpy, special_tokens, eot, chars=None, controls=None, encode_controls=None, files=None,
                 chat_template=None, named_tokens=None, encode_joined=None):
        self.kind, self.name, self.token_bytes, self.encode_numpy = kind, name, token_bytes, encode_numpy
        self.special_tokens, self.chars, self.files = special_tokens, chars, files or {}
        self.controls = special_tokens if controls is None else controls
        self.chat_template, self.named_tokens = chat_template, named_tokens or {}
        self._encode_controls, self._encode_joined = encode_controls, encode_joined
        self.vocab_size = len(token_bytes)
        self.eot_id = None if eot is None else special_tokens[eot]
        self.added, self.without_thinking = [], False

    @functools.cached_property
    def fingerprint(self):
        """Changes when the bytes of any id change. What wrapped them does not count: GPT-2 by tiktoken is GPT-2's
        tokenizer.json."""
        digest = hashlib.sha256()
        for i, data in enumerate(self.token_bytes):
            if data is not None:
                digest.update(b"%d %d " % (i, len(data)) + data)
        return digest.hexdigest()

    def extends(self, other: "Tokenizer") -> bool:
        """Whether every id of another tokenizer stands for the same bytes here."""
        return self.token_bytes[:other.vocab_size] == other.token_bytes

    def with_controls(self, tokens) -> "Tokenizer":
        """This tokenizer with those of the control tokens that it lacks added behind its ids; itself where it lacks none."""
        new = [token for token in tokens if token not in self.controls]
        if not new:
            return self
        special = self.special_tokens | {token: self.vocab_size + i for i, token in enumerate(new)}
        if self.kind == "json":
            found = tokenizer_of_json(self.files["tokenizer.json"], f"the tokenizer.json of {self.name}", self.name, self.files, more=new)
            if any(found.special_tokens.get(token) != i for token, i in special.items()):
                raise UserError(f"{' and '.join(new)} cannot be added to the tokenizer {self.name} behind its ids: add them to its tokenizer.json")
        else:
            table = self.token_bytes + [token.encode() for token in new]
            found = Tokenizer(self.kind, self.name, table, self.encode_numpy, special, None, self.chars)
            found.added = self.added + new
        found.eot_id = self.eot_id
        return found

    def encode_documents(self, texts: list[str]) -> np.ndarray:
        """ids (n,) of texts, each by itself and followed by the end-of-text token; in one call where the tokenizer can, for which threads
        hold Python's lock but once."""
        spelled = self.token_bytes[self.eot_id].decode()
        if self._encode_joined and not any(spelled in text for text in texts):
            return self._encode_joined(spelled.join([*texts, ""]), spelled)
        end = np.array([self.eot_id], np.uint32)
        return np.concatenate([part for text in texts for part in (self.encode_numpy(text), end)])

    def encode(self, text: str) -> list[int]:
        """str -> list of ids. Always ordinary text: `<|endoftext|>` typed by a person is not the control token."""
        return self.encode_numpy(text).tolist()

    @functools.cached_property
    def _control(self):
        return re.compile("|".join(map(re.escape, sorted(self.controls, key=len, reverse=True))) or "(?!)")

    def find_controls(self, text):
        """[(start, stop)] of all that spells a control token in a text."""
        return [match.span() for match in self._control.finditer(text)]

    def encode_controls(self, text, spans):
        """str -> list of ids, in which the control tokens at `spans`, some of find_controls(text), are such, and all else,
        whatever it spells, is ordinary text."""
        if self._encode_controls:
            return self._encode_controls(text, spans, spans == self.find_controls(text))
        ids, at = [], 0
        for start, stop in spans:
            ids += [*self.encode(text[at:start]), self.controls[text[start:stop]]]
            at = stop
        return ids + self.encode(text[at:])

    def decode_bytes(self, ids) -> bytes:
        """ids -> the bytes they stand for, control tokens spelled out. Bytes of parts, joined, are those of the whole,
        so a stream can be decoded as it comes. An id beyond the vocabulary is a UserError; one that the vocabulary leaves
        unused (o200k_base has some, and a model may pick one) stands for nothing."""
        parts = []
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(f"id {int(i)} is not in the vocabulary of the {self.name} tokenizer (ids below "
                                f"{self.vocab_size:,}); decode with the tokenizer that made the ids")
            parts.append(self.token_bytes[i] or b"")
        return b"".join(parts)

    def decode(self, ids) -> str:
        """ids -> str; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def identity(self) -> dict:
        """What meta.json and a checkpoint remember; tokenizer_from_identity makes the tokenizer from it again."""
        identity = {"kind": self.kind, "name": self.name, "vocab_size": self.vocab_size, "eot_id": self.eot_id,
                    "fingerprint": self.fingerprint}
        more = {"chars": self.chars, "added": self.added, "without_thinking": self.without_thinking}
        return identity | {key: value for key, value in more.items() if value}

    def save(self, folder: str) -> None:
        """Writes the files into folder that the identity alone would not do for (kind "json"): tokenizer.json, and the
        configuration that came with it."""
        for name, text in self.files.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())


def load_tokenizer(spec: str, eot: str | None = None) -> Tokenizer:
    """The tokenizer named by spec: "byte", a name of tiktoken's, or a path to a tokenizer.json or its folder.

    eot names the token that ends a document where the usual one will not do. Raises UserError.
    """
    if spec == "byte":
        if eot is not None:
            raise UserError(f"--eot {eot}: the byte tokenizer has one end-of-text token of its own; leave --eot out")
        return byte_tokenizer()
    if spec == "char":
        raise UserError("the char tokenizer is made from a corpus: prepare one with --tokenizer char")
    if os.sep in spec or spec.endswith(".json"):
        return json_tokenizer(spec, eot)
    import tiktoken

    names = tiktoken.list_encoding_names()
    if spec in names:
        return tiktoken_tokenizer(spec, eot)
    if os.path.exists(spec):
        return json_tokenizer(spec, eot)
    nearest = difflib.get_close_matches(spec, ["byte", "char", *names], n=1)
    guess = f"did you mean {nearest[0]}? " if nearest else ""
    raise UserError(f"unknown tokenizer {spec!r}: {guess}byte, char, {', '.join(names)} and paths to a tokenizer.json "
                    "work")


def tokenizer_from_identity(identity: dict, folder: str) -> Tokenizer:
    """The tokenizer that gave this identity(); folder holds its tokenizer.json where it saved one. Raises UserError
    where what is found now is not the same tokenizer."""
    check_identity(identity, folder)
    kind, has_eot = identity["kind"], identity["eot_id"] is not None
    if kind == "byte":
        tokenizer = byte_tokenizer()
    elif kind == "char":
        tokenizer = ordered_char_tokenizer(identity["chars"], has_eot)
    elif kind == "tiktoken":
        tokenizer = tiktoken_tokenizer(identity["name"])
    elif kind == "json":
        tokenizer = json_tokenizer(folder)
        tokenizer.name = identity["name"]
    else:
        raise UserError(f"unknown kind of tokenizer {kind!r}: byte, char, tiktoken and json are known")
    tokenizer = tokenizer.with_controls(identity.get("added", []))
    tokenizer.eot_id, tokenizer.without_thinking = identity["eot_id"], identity.get("without_thinking", False)
    if tokenizer.fingerprint != identity["fingerprint"] or tokenizer.vocab_size != identity["vocab_size"]:
        raise UserError(f"the {tokenizer.name} tokenizer found in {folder} is not the one that was saved (fingerprint "
                        f"{tokenizer.fingerprint[:12]}, saved {identity['fingerprint'][:12]}); put the saved one back")
    return tokenizer


def check_identity(identity: dict, where: str) -> None:
    """UserError where what meta.json or a checkpoint says of its tokenizer is not what Tokenizer.identity() gives."""
    kinds: dict[str, Any] = {"kind": str, "name": str, "fingerprint": str, "vocab_size": int, "eot_id": (int, type(None)), "chars": (str, type(None))}
    if not isinstance(identity, dict):
        raise UserError(f"{where} has a tokenizer that is no object: restore the file, or prepare the data again")
    wrong = [key for key, kind in kinds.items() if isinstance(identity.get(key), bool) or not isinstance(identity.get(key), kind)]
    size, eot = identity.get("vocab_size"), identity.get("eot_id")
    if not wrong and not (0 < size <= LARGEST_VOCABULARY and (eot is None or 0 <= eot < size)):
        wrong = ["vocab_size", "eot_id"]
    if not wrong and (identity["kind"] == "char") != bool(identity.get("chars")):
        wrong = ["chars"]
    added = identity.get("added", [])
    if not isinstance(added, list) or len(added) > 1000 or not all(isinstance(token, str) and token and token.isascii() for token in added):
        wrong.append("added")
    if not isinstance(identity.get("without_thinking", False), bool):
        wrong.append("without_thinking")
    if wrong:
        raise UserError(f"{where} has a tokenizer without a valid {' and '.join(wrong)}: restore the file, or prepare the data again")


def byte_tokenizer():
    """256 bytes and an end-of-text id: nothing to download, nothing it cannot spell."""
    def encode(text):
        return np.frombuffer(whole(text).encode(), np.uint8).astype(np.uint16)

    token_bytes = [bytes([b]) for b in range(256)] + [b"<|endoftext|>"]
    return Tokenizer("byte", "byte", token_bytes, encode, {"<|endoftext|>": 256}, "<|endoftext|>")


def char_tokenizer(chars, with_eot):
    """An id for each character of chars (an iterable of str, of any length), in sorted order; with_eot adds an
    end-of-text id after them, for corpora of several documents."""
    seen = set()
    for part in [chars] if isinstance(chars, str) else chars:
        seen.update(part)
    return ordered_char_tokenizer("".join(sorted(seen)), with_eot)


def ordered_char_tokenizer(chars, with_eot):
    """As char_tokenizer, chars being a str whose i-th character has id i."""
    points = np.frombuffer(chars.encode("utf-32-le", "surrogatepass"), "<u4")
    order = np.argsort(points).astype(np.uint32)
    sorted_points = points[order]

    def encode(text):
        text_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        place = np.searchsorted(sorted_points, text_points).clip(max=len(chars) - 1)
        known = sorted_points[place] == text_points
        if not known.all():
            strange = sorted({chr(p) for p in text_points[~known]})
            more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
            raise UserError(f"the char tokenizer does not know {', '.join(map(repr, strange[:5]))}{more}: it has only "
                            f"the {len(chars)} characters of its corpus, {shortened(chars)!r}; write with those, or "
                            "prepare the data with --tokenizer byte")
        return order[place]

    token_bytes = [char.encode("utf-8", "surrogatepass") for char in chars] + [b"<|endoftext|>"] * with_eot
    special = {"<|endoftext|>": len(chars)} if with_eot else {}
    return Tokenizer("char", "char", token_bytes, encode, special, "<|endoftext|>" if with_eot else None, chars=chars)


def shortened(text, length=100):
    """A text, or its beginning where it is longer than `length` characters."""
    return text if len(text) <= length else text[:length] + "..."


def whole(text):
    """text with U+FFFD for halves of surrogate pairs: JSON can spell them (\\ud800), UTF-8 cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)


def tiktoken_tokenizer(name, eot=None):
    """tiktoken's encoding of that name; its files are fetched once and cached by tiktoken."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever its HTTP library says
        raise UserError(f"tiktoken could not fetch its files for {name!r} ({type(error).__name__}): connect to the "
                        "network once, or set TIKTOKEN_CACHE_DIR to a folder that holds them already") from None

    def encode(text, *controls):
        try:
            # disallowed_special=() makes all other control tokens ordinary text; a third faster than encode_ordinary's list
            return encoding.encode_to_numpy(text, allowed_special=set(controls), disallowed_special=())
        except UnicodeEncodeError:
            return encode(whole(text), *controls)

    token_bytes = []
    for i in range(encoding.n_vocab):
        try:
            token_bytes.append(encoding.decode_single_token_bytes(i))
        except KeyError:  # cl100k_base and o200k_base leave some unused
            token_bytes.append(None)
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    return Tokenizer("tiktoken", name, token_bytes, encode, special, end_of_text(special, eot, None, name), encode_joined=encode)


def json_tokenizer(path, eot=None):
    """A tokenizer.json (path to it, or to its folder) by the tokenizers library, with the tokenizer_config.json and
    chat_template.jinja beside it. Raises UserError.

    Text never makes a token that the file marks as special; added tokens that it does not mark so (Qwen3's <think>)
    are ordinary vocabulary. vocab_size counts added tokens: the highest id + 1.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        with open(path, encoding="utf-8", newline="") as file:
            json_text = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"no tokenizer at {path}: {error.strerror}; expected a tokenizer.json or its folder") from None
    except ValueError as error:
        raise UserError(f"{path} is not a tokenizer.json: {error}") from None
    return tokenizer_of_json(json_text, path, os.path.basename(folder), read_tokenizer_config(folder), eot)


def tokenizer_of_json(json_text, path, name, files, eot=None, more=()):
    """The tokenizer of a tokenizer.json's text, with the files beside it as read_tokenizer_config gives them; `more` special tokens are added."""
    import tokenizers

    try:
        if len(json_text) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} characters")
        engine = tokenizers.Tokenizer.from_str(json_text)
    except Exception as error:  # tokenizers raises a bare Exception
        raise UserError(f"{path} is not a tokenizer.json: {error}") from None
    config, chat_template = tokenizer_config(files, path)
    for i, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if engine.token_to_id(token["content"]) is None:  # older files name some here alone
            engine.add_tokens([tokenizers.AddedToken(**token)])
            if engine.token_to_id(token["content"]) != int(i):
                raise UserError(f"tokenizer_config.json gives {token['content']} the id {i}, the next free one of {path} is "
                                f"{engine.token_to_id(token['content'])}: the two files do not belong together")
    if more:
        engine.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in more])
        json_text = engine.to_str()
    engine.encode_special_tokens = True
    engine.no_truncation()  # a file saved after training may hold both, and would lose or add ids silently
    engine.no_padding()

    def encode(text):
        # a batch of one: the fast call without offsets (30% less time) is there for batches only
        return np.array(engine.encode_batch_fast([whole(text)], add_special_tokens=False)[0].ids, np.uint32)

    added = engine.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    controls = special | {token.content: i for i, token in added.items() if re.fullmatch(r"<.+>|\[.+\]", token.content)}

    @functools.cache
    def renamed():
        """The same tokenizer with control tokens that no text spells, and what gives their ids; in U+FDD0, which is never
        a character."""
        state = json.loads(engine.to_str())
        names = {i: f"\ufdd0{i}\ufdd0" for i in controls.values()}
        for token in state["added_tokens"]:
            if token["id"] in names:
                token.update(content=names[token["id"]], normalized=False)
        other = tokenizers.Tokenizer.from_str(json.dumps({**state, "post_processor": None}))
        return other, names, {other.token_to_id(name): i for i, name in names.items()}

    def encode_controls(text, spans, all_of_them):
        if all_of_them:
            engine.encode_special_tokens = False
            try:
                return engine.encode_batch_fast([whole(text)], add_special_tokens=False)[0].ids
            finally:
                engine.encode_special_tokens = True
        other, names, ids = renamed()
        parts, at = [], 0
        for start, stop in spans:
            parts += [text[at:start].replace("\ufdd0", "\ufffd"), names[controls[text[start:stop]]]]
            at = stop
        parts.append(text[at:].replace("\ufdd0", "\ufffd"))
        found = other.encode_batch_fast([whole("".join(parts))], add_special_tokens=False)[0].ids
        if sum(i in ids for i in found) != len(spans) or set(found) & (set(controls.values()) - set(ids)):
            raise UserError(f"{path} makes a control token of ordinary text: take the control tokens out of the messages")
        return [ids.get(i, i) for i in found]

    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items() if key.endswith("_token")}
    named = {key: value for key, value in named.items() if isinstance(value, str)}
    eot = end_of_text(special, eot, named.get("eos_token"), path)
    return Tokenizer("json", name, json_token_bytes(engine, path), encode, special, eot, controls=controls,
                     encode_controls=encode_controls, files={**files, "tokenizer.json": json_text}, chat_template=chat_template,
                     named_tokens=named)


def read_tokenizer_config(folder):
    """{name: text} of what stands beside a tokenizer.json and belongs to it."""
    files = {}
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        try:
            files[name] = read_bounded(os.path.join(folder, name)).decode()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise refuse(os.path.join(folder, name), "a tokenizer's configuration", error) from None
    return files


def tokenizer_config(files, path):
    """(tokenizer_config.json as a dict, the chat template or None) of the files beside the tokenizer.json at path."""
    try:
        config = json.loads(files.get("tokenizer_config.json", "{}"))
        template = files.get("chat_template.jinja") or config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        config["added_tokens_decoder"] = dict(config.get("added_tokens_decoder") or {})
        for i, token in config["added_tokens_decoder"].items():
            int(i), token["content"]
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise refuse(os.path.join(os.path.dirname(path), "tokenizer_config.json"), "a tokenizer's configuration", error) from None
    return config, template


def end_of_text(special, asked, configured, name):
    """The special token that ends a document: the one asked for, else one named for it, else the configured one."""
    if asked is not None:
        if asked not in special:
            raise UserError(f"--eot {asked}: {name} has no such special token; it has "
                            f"{', '.join(sorted(special)) or 'none'}")
        return asked
    for token in (configured if configured in END_OF_TEXT else None, *END_OF_TEXT, configured):
        if token in special:
            return token
    return None


def byte_letters():
    """{byte: the printable character that GPT-2 shows it as}: itself where it is one, else the next free one from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def json_token_bytes(engine, path):
    """The bytes of each id of a tokenizer.json, read off its decoder: bytes written as printable characters (GPT-2's
    way), or text with ▁ for a space and <0x0A> for a lone byte (sentencepiece's way)."""
    def parts(component):
        """The types of the steps a component consists of."""
        state = json.loads(component.__getstate__()) if component else {}
        return {step["type"] for step in state.get("decoders", state.get("pretokenizers", [state])) if step}

    decoders = parts(engine.decoder) or parts(engine.pre_tokenizer) & {"ByteLevel"}
    strange = decoders - {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if strange:
        raise UserError(f"{path} decodes by {', '.join(sorted(strange))}, where a token's bytes depend on its "
                        "neighbours; tokenizers of the kinds ByteLevel and Metaspace work")
    byte_of = {letter: b for b, letter in byte_letters().items()}

    def token_bytes(token):
        if "ByteLevel" in decoders:
            return bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
        if "ByteFallback" in decoders and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return (token.replace("▁", " ") if decoders & {"Metaspace", "Replace"} else token).encode()

    vocabulary = engine.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=0) >= LARGEST_VOCABULARY:
        raise UserError(f"{path} has an id {max(vocabulary.values()):,}: ids below {LARGEST_VOCABULARY:,} work")
    table = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        table[i] = token_bytes(token)
    for i, token in engine.get_added_tokens_decoder().items():
        table[i] = token.content.encode()
    return table


def char_tokenizer_from_nanogpt(path):
    """The char tokenizer of a nanoGPT meta.pkl (its stoi), read without running anything in it. Raises UserError."""
    try:
        stoi = read_plain_pickle(path)["stoi"]
        chars = [char for char, i in sorted(stoi.items(), key=lambda item: item[1])]
        in_order = sorted(stoi.values()) == list(range(len(stoi)))
    except Exception as error:  # a damaged pickle can fail in any way
        raise refuse(path, "a nanoGPT meta.pkl (a plain dict with stoi)", error) from None
    if not stoi or not in_order or any(not isinstance(char, str) or len(char) != 1 for char in chars):
        raise UserError(f"{path}: expected stoi to number single characters from 0 on without gaps")
    return ordered_char_tokenizer("".join(chars), with_eot=False)
