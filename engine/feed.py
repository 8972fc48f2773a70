"""What a run reads: finds its data sets or prepares them, checks them against the settings and the weights, and cuts them into samples."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.order import WindowReader
from data.packing import MixedReader, RecordReader
from data.report import FILE as REPORT
from data.report import copy_report, read_report, report_lines
from data.shards import TokenDataset, find_dataset
from data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_identity
from engine import config as settings
from engine.errors import UserError
from engine.evaluate import Reader, check_split, windows_of
from engine.families import Weights, of_checkpoint, open_weights

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.config import Config
    from engine.processes import Place

Say = Callable[[str], Any]


@dataclass
class Feed:
    """The readers of samples, and whose tokens they are."""

    train: Reader
    val: Any  # a Reader, None where nothing is evaluated, as
    general: Reader | None  # general_dataset's, None without one
    tokenizer: Tokenizer | None  # None where nothing says which one it is
    tokenizer_identity: dict | None

    @property
    def fingerprint(self) -> str:
        """Of the tokens that are trained on."""
        return self.train.fingerprint

    def everything(self) -> str:
        """Of all tokens that ranks have to hold alike."""
        return "/".join(reader.fingerprint for reader in (self.train, self.val, self.general) if reader)


def open_feed(place: Place, config: Config, weights: Weights | None, resumed: Checkpoint | None) -> Feed:
    """The Feed of a run, on all ranks. Fills in what follows from the data: vocab_size, max_iters, and the rest of the settings
    with them (resolve)."""
    if place.local_rank == 0 or place.store is None:  # one process of a machine prepares, if there is something to prepare
        with place.agreement():
            folders = find_folders(config, weights, resumed, place)
    else:
        with place.agreement():
            pass
        folders = find_folders(config, weights, resumed, place)
    with place.agreement():
        return read_folders(config, weights, folders, place.say)


def find_folders(config: Config, weights: Weights | None, resumed: Checkpoint | None, place: Place) -> dict[str, str]:
    """{setting: folder} of the data sets that a config names, prepared where they were not."""
    folders = {"dataset": find_records(config, weights, resumed, place) if config.task == "sft" else find_text(config.dataset, place.say)}
    for key in ("general_dataset", "replay_dataset"):
        if name := getattr(config, key):
            folders[key] = find_text(name, place.say)
    return folders


def find_text(name: str, say: Say) -> str:
    """The folder of a data set; `stdlib`, which needs no network, is prepared on the way."""
    try:
        return find_dataset(name, settings.ROOT)
    except UserError:
        if name != "stdlib":
            raise
    from prepare import prepare

    say("preparing the data set stdlib: this Python's own standard library, as bytes")
    return prepare("stdlib")


def find_records(config: Config, weights: Weights | None, resumed: Checkpoint | None, place: Place) -> str:
    """The folder of a data set of records; what has not been prepared yet is, with the tokenizer of the weights."""
    try:
        folder = find_dataset(config.dataset, settings.ROOT)
        if any(name == "meta.json" or "train" in name and name.endswith(".bin") for name in os.listdir(folder)):
            return folder
    except UserError:
        pass
    from prepare import prepare

    by_hand = f"python prepare.py {config.dataset} --task=sft --tokenizer=..."
    tokenizer = weights.tokenizer if weights else resumed and tokenizer_of(resumed, config)
    if weights is None and not resumed:
        raise UserError(f"task=sft with init_from=scratch needs records that are prepared already, and {config.dataset} is not: nothing says which "
                        f"tokenizer it is to be made with; {by_hand} prepares it, or --init_from names weights to start from")
    if tokenizer is None:
        raise UserError(f"{weights.path if weights else resumed.path} does not say which tokenizer it was trained with: prepare the records first, {by_hand}")
    place.say(f"{config.dataset} is prepared with the tokenizer of {weights.path if weights else resumed.path}, where it is not yet")
    return prepare(config.dataset, task="sft", tokenizer=tokenizer, train_on=config.train_on, block_size=config.block_size, fields=config.fields,
                   skip_bad=config.skip_bad, quiet=True)


def tokenizer_of(resumed: Checkpoint, config: Config) -> Tokenizer | None:
    """The tokenizer of a run that goes on. On a machine that does not see its folder, that of the weights it started from."""
    try:
        return of_checkpoint(resumed).tokenizer
    except (UserError, OSError):
        if config.init_from in ("scratch", "resume"):
            raise
        return open_weights(config.init_from).tokenizer


def read_folders(config: Config, weights: Weights | None, folders: dict[str, str], say: Say) -> Feed:
    """The Feed of data sets that are there; UserError where they do not fit the settings, the weights or each other."""
    folder, evaluated = folders["dataset"], bool(config.eval_interval or config.eval_only)
    train = TokenDataset(folder, "train")
    val = TokenDataset(folder, "val") if evaluated else None
    check_task(train, config)
    vocab_size = config.vocab_size or train.vocab_size or 50304  # bare token files: GPT-2's, as in nanoGPT
    if weights and config.resize_vocab:
        vocab_size = max(vocab_size, train.vocab_size or 0)
    tokenizer = find_tokenizer(train, folder, weights, vocab_size, config.task, say)
    if weights and config.task == "sft" and tokenizer and tokenizer.vocab_size > vocab_size:
        if config.lora_rank:
            raise UserError(f"{weights.path} has no control tokens for a chat: their rows are new, and lora_rank={config.lora_rank} would leave them at their "
                            "first values; lora_rank=0 would work, or a model with a chat template")
        say(f"note: rows {vocab_size} to {tokenizer.vocab_size - 1} of the vocabulary, the control tokens of a chat, are new to {weights.path} and start from "
            "first values")
        vocab_size = tokenizer.vocab_size
    config.vocab_size = vocab_size

    def text(key, split, seed=None):
        """A reader of one of the general data sets, which must be of the same tokenizer."""
        dataset = TokenDataset(folders[key], split)
        if dataset.marked:
            raise UserError(f"{key}={getattr(config, key)} holds records for SFT: expected a data set of text, such as stdlib")
        check_same_tokenizer(dataset, folders[key], key, tokenizer)
        return windows(dataset, split, seed)

    def windows(dataset, split, seed=None):
        check_split(dataset, split, config.block_size)
        dataset.check_ids(vocab_size)
        return WindowReader(dataset, config.block_size, seed, document_end(dataset, tokenizer) if config.document_mask else None)

    def rows(dataset, split, seed=None):
        dataset.check_ids(vocab_size)
        return RecordReader(dataset, config.block_size, config.pack, seed)

    cut = rows if config.task == "sft" else windows
    samples = cut(train, "train", config.seed)
    if config.replay_dataset:
        samples = MixedReader(samples, text("replay_dataset", "train", config.seed), config.replay_fraction)
    if config.num_epochs is not None:
        config.max_iters = updates_of(config, samples)
    settings.resolve(config)
    feed = Feed(samples, cut(val, "val") if val else None, text("general_dataset", "val") if config.general_dataset and evaluated else None,
                tokenizer, train.tokenizer_identity)
    if feed.val and not feed.val.labels(0, windows_of(feed.val, config.eval_tokens)):
        raise UserError(f"eval_tokens={config.eval_tokens}: the first rows of the val split of {folder} bear no label; a larger number would work")
    return feed


def updates_of(config: Config, samples: Reader) -> int:
    """The updates that num_epochs takes, the last one going on into the next epoch."""
    return max(1, math.ceil(config.num_epochs * samples.epoch / (config.micro_batches * config.batch_size) - 1e-9))


def check_task(dataset: TokenDataset, config: Config) -> None:
    """UserError unless a data set is of the kind that the task trains on, made as the settings say."""
    if dataset.marked and config.task != "sft":
        raise UserError(f"{dataset.path} holds records of which some tokens are to be learnt: --task=sft trains on them")
    if config.task != "sft":
        return
    if not dataset.marked:
        raise UserError(f"{dataset.path} holds text, in which nothing marks answers: prepare records with prepare.py ... --task=sft, or give --task=pretrain")
    made = about_records(dataset).get("train_on", config.train_on)
    if "train_on" in config.given and made != config.train_on:
        raise UserError(f"train_on={config.train_on}, but {dataset.path} was prepared with train_on={made}: prepare it again, or give train_on={made}")
    config.train_on = made


def about_records(dataset: TokenDataset) -> dict[str, Any]:
    """What meta.json says of how records were prepared."""
    found = dataset.meta.get("sft")
    return found if isinstance(found, dict) else {}


def tell_report(samples: Reader, run: str, config: Config, say: Say) -> None:
    """Says what the records are like that are trained on, and puts their report into the run's folder."""
    folder = os.path.abspath(samples.dataset.path)
    if config.task != "sft" or not os.path.exists(os.path.join(folder, REPORT)):
        return  # text, or records that prepare.py has not made
    say("\n".join(("", *report_lines(read_report(folder)))))
    if not config.eval_only:
        copy_report(folder, run)


def find_tokenizer(dataset: TokenDataset, folder: str, weights: Weights | None, vocab_size: int, task: str, say: Say) -> Tokenizer | None:
    """The data set's tokenizer (GPT-2's for bare files of its vocabulary), or None; UserError where the weights have another."""
    tokenizer = None
    if dataset.tokenizer_identity:
        tokenizer = tokenizer_from_identity(dataset.tokenizer_identity, folder)
    elif vocab_size in (50257, 50304):
        try:
            tokenizer = load_tokenizer("gpt2")
        except UserError as error:
            say(f"note: no sample texts: {error}")
    if weights and weights.tokenizer and tokenizer and weights.tokenizer.fingerprint != tokenizer.fingerprint:
        # as --resize_vocab asks for; a chat's control tokens may be more than the weights' tokenizer has
        if (task == "sft" or vocab_size > weights.model_config.vocab_size) and tokenizer.extends(weights.tokenizer):
            return tokenizer
        raise UserError(f"{weights.path} was trained with tokenizer {weights.tokenizer.name}, this data set is made with {tokenizer.name}: "
                        "prepare the data with the weights' tokenizer")
    return tokenizer


def check_same_tokenizer(dataset: TokenDataset, folder: str, key: str, tokenizer: Tokenizer | None) -> None:
    """UserError where the data set that the setting `key` names has ids of another tokenizer."""
    identity = dataset.tokenizer_identity
    if not tokenizer or not identity or identity["fingerprint"] == tokenizer.fingerprint:
        return
    if not tokenizer.extends(tokenizer_from_identity(identity, folder)):
        raise UserError(f"{key}={folder} is made with tokenizer {identity['name']}, the data set that is trained on with {tokenizer.name}: prepare it with "
                        "that one (prepare.py --tokenizer=...)")


def document_end(dataset: TokenDataset, tokenizer: Tokenizer | None) -> int:
    """The id that ends a document of a data set."""
    eot_id = dataset.tokenizer_identity["eot_id"] if dataset.tokenizer_identity else tokenizer.eot_id if tokenizer else None
    if eot_id is None:
        raise UserError(f"document_mask=True, but nothing says which token ends a document of {dataset.path}: prepare it with prepare.py, or leave "
                        "document_mask out")
    return eot_id
