"""What a start goes on from: the newest checkpoint of its folder, one that was asked for, or other weights; whether it may; and its values.

A change of the architecture or the tokenizer stops a run that goes on, a change of what draws the curve stops it unless
--allow_change is given, and everything else is free.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine import checkpoint as ckpt
from engine import lora
from engine.config import ADAPTERS, ARCHITECTURE, CURVE, ROPE
from engine.errors import UserError
from engine.families import with_new_rows

if TYPE_CHECKING:
    from engine.config import Config
    from engine.families import Weights
    from engine.feed import Feed
    from engine.optim import AdamW, LossScale, Muon
    from engine.processes import Place
    from model import GPT, ModelConfig

Say = Callable[[str], Any]


def began_in_this_job(run: str, place: Place) -> bool:
    """Whether a run's last start was one of this job's, which torchrun starts again where a process fails or machines come and go."""
    try:
        return time.time() - os.path.getmtime(os.path.join(run, "config.json")) < time.monotonic() - place.job_started
    except OSError:
        return False


def find_resumable(run: str, config: Config, place: Place) -> ckpt.Checkpoint | None:
    """The checkpoint that this start goes on from, or None for a new run."""
    if config.resume == "never" and config.resume_step is not None:
        raise UserError(f"resume=never starts anew and resume_step={config.resume_step} goes back: give one of the two")
    inside = os.path.commonpath([os.path.abspath(run), os.path.abspath(config.init_from)]) == os.path.abspath(run)
    if config.resume == "never" and os.path.exists(config.init_from) and inside:
        raise UserError(f"init_from={config.init_from} lies in out_dir={run}, which resume=never sets aside: give another --out_dir for the branch")
    if config.resume == "never" and not began_in_this_job(run, place):
        return None
    newest = ckpt.newest_complete(run, place.say)
    if config.resume_step is None:
        return newest
    if newest and newest.step >= config.resume_step and newest.manifest["config"].get("resume_step") == config.resume_step:
        return newest  # the same command again: it has gone back already
    return ckpt.newest_complete(run, place.say, config.resume_step)


def share(place: Place, checkpoint: ckpt.Checkpoint | None) -> ckpt.Checkpoint | None:
    """Rank 0's Checkpoint, or None, on every rank; their machines need not see its folder."""
    found = place.from_first(checkpoint and {"path": checkpoint.path, "manifest": checkpoint.manifest})
    return checkpoint or found and ckpt.Checkpoint(**found)


def load_values(place: Place, model: GPT, optimizer: AdamW | Muon, scale: LossScale, config: Config, resumed: ckpt.Checkpoint | None,
                weights: Weights | None) -> tuple[int, int, list[list[int]]]:
    """Gives model, optimizer and loss scale the values that a run starts from: a checkpoint's, other weights' or first ones.

    Returns (updates made, samples seen, [[step, first sample, samples] of each update passed over]).
    """
    parameters = dict(model.named_parameters())
    if resumed:
        send, saved = place.layout == "ddp", resumed.manifest  # rank 0's machine may have the run's folder alone: it reads and sends
        ckpt.fill(place, parameters, parameters, resumed.sources("model"), resumed.path, send)
        ckpt.fill(place, parameters, optimizer.state(), resumed.sources("optimizer"), resumed.path, send)
        optimizer.updates = saved["optimizer_updates"]
        scale.load(saved["loss_scale"])
        return resumed.step, resumed.samples, list(saved["skips"])
    optimizer.reset()
    scale.reset()
    adapters = lora.first_values(parameters, config.seed)
    if weights:
        sources, had = weights.sources, weights.model_config.vocab_size
        if config.vocab_size > had:
            sources = with_new_rows(sources, had, model.first_values(config.seed))
        ckpt.fill(place, parameters, parameters, sources | adapters, weights.path)
        if weights.checkpoint and config.init_optimizer and (config.lora_rank or weights.checkpoint.manifest["config"].get("lora_rank")):
            place.say(f"note: the optimizer starts anew: what {weights.path} has of it is not about the parameters that are trained here")
        elif weights.checkpoint and config.init_optimizer:
            ckpt.fill(place, parameters, optimizer.state(), weights.checkpoint.sources("optimizer"), weights.path)
            optimizer.updates = weights.checkpoint.manifest["optimizer_updates"]
    else:
        ckpt.fill(place, parameters, parameters, model.first_values(config.seed) | adapters, "the first values")
    return 0, 0, []


def tell_architecture(config: Config, found: ModelConfig, where: str, say: Say) -> None:
    """Gives the architecture of found weights to a config (take_architecture) and says what changes by it."""
    for sentence in take_architecture(config, found, where):
        say(f"note: {sentence}")


def check_resumable(resumed: ckpt.Checkpoint, config: Config, feed: Feed, say: Say) -> list[tuple[str, Any, Any]]:
    """Stops a resume that would change the architecture, the tokenizer or, unasked, the curve; returns allowed changes."""
    saved = resumed.manifest
    if sentence := keep_saved(config, saved["config"]):
        say(f"note: {sentence}")
    changed = compare_with_saved(config, {"lora_rank": 0, **vars(resumed.model_config()), **saved["config"]}, resumed.path)  # older ones lack newer switches
    old, new = saved["tokenizer"], feed.tokenizer_identity
    if old and new and old["fingerprint"] != new["fingerprint"]:
        raise UserError(f"{resumed.path} was trained with tokenizer {old['name']} ({old['fingerprint'][:12]}), dataset {config.dataset} is "
                        f"made with {new['name']} ({new['fingerprint'][:12]}): prepare the data with the checkpoint's tokenizer")
    if saved["dataset"] != feed.fingerprint:
        if not config.allow_change:
            raise UserError(f"dataset {config.dataset} holds other tokens than {resumed.path} was trained on, which changes the curve: give "
                            "the data set it was trained on, or --allow_change to go on with this one")
        changed.append(("dataset", saved["dataset"], feed.fingerprint))
    for key, before, now in changed:
        say(f"note: {key} was {before}, is {now} from here on")
    return changed


def other_machine(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What to say where a manifest and this start, as a manifest has it, differ in what last bits depend on; of what it does not hold nothing is known."""
    def facts(m):
        processor = m["versions"].get("processor")
        return f"{m['device']}{f' ({processor})' if processor and saved['versions'].get('processor') else ''}, torch {m['versions']['torch']}, {m['threads']} threads"

    if facts(saved) == facts(now):
        return None
    return f"it was written on {facts(saved)}; this is {facts(now)}: the curve goes on, its last bits may differ"


def take_architecture(config: Config, model: ModelConfig, where: str) -> list[str]:
    """Gives the architecture of found weights (a ModelConfig) to a config; returns sentences on what the config file said else.

    What the command line said must agree. A smaller block_size stands, since weights can be cropped to it; so do a larger one and the settings
    of rope with pos=rope, and with resize_vocab a larger vocabulary.
    """
    sentences, wrong = [], []
    turned = [key for key in ROPE if model.pos == "rope" and config.given.get(key) == "command line" and getattr(config, key) != getattr(model, key)]
    if {"rope_scaling", "rope_scaling_type"} & set(turned) and config.given.get("rope_original_context") != "command line":
        config.rope_original_context = original_context(model)
        turned.append("rope_original_context")
    if turned:
        sentences.append(f"positions turn by {', '.join(f'{key}={getattr(config, key)}' for key in turned)} from here on, not by "
                         f"{', '.join(str(getattr(model, key)) for key in turned)} as {where} has it: it takes some training to get used to")
    for key in ARCHITECTURE:
        asked, found = getattr(config, key), getattr(model, key)
        if key in turned:
            continue
        if key == "block_size" and key in config.given and (asked < found or model.pos == "rope"):
            if asked > found:
                sentences.append(f"block_size={asked} is longer than the {found} tokens that {where} was trained on: it has yet to learn the positions beyond")
            continue
        if key == "vocab_size" and asked is not None and asked > found and config.resize_vocab:
            sentences.append(f"rows {found} to {asked - 1} of the vocabulary are new to {where} and start from first values")
            continue
        if key in config.given and asked is not None and asked != found:
            sentence = f"{key} is {found} in {where}, not {asked} as {config.given[key]} says"
            if key == "vocab_size" and asked > found:
                sentence += " (--resize_vocab adds new rows)"
            if key == "block_size":
                sentence += " (positions are learned, there are none beyond)"
            if config.given[key] == "command line":
                wrong.append(f"{sentence}: leave it out, or start from other weights")
            else:
                sentences.append(f"{sentence}; the weights' architecture counts")
        setattr(config, key, found)
    if wrong:
        raise UserError(*wrong)
    return sentences


def original_context(model: ModelConfig) -> int:
    """Tokens that a ModelConfig with rope was trained on before any scaling."""
    if model.rope_scaling is None:
        return model.block_size
    return round(model.block_size / model.rope_scaling) if model.rope_scaling_type == "linear" else model.rope_original_context


def tell_other_run(config: Config, resumed: ckpt.Checkpoint, say) -> None:
    """Says what the settings mean that a run which goes on does not have; UserError where it is a run of another kind. Before any data is looked for."""
    saved = resumed.manifest["config"]
    if saved.get("task", config.task) != config.task:
        raise UserError(f"{resumed.path} is of a run of task={saved['task']}, and this is task={config.task}: give another --out_dir, and --init_from={config.out_dir} "
                        "to start from its weights")
    for key, means in (("init_from", "its weights are the checkpoint's own"), ("dataset", "its tokens have to be the same")):
        if saved.get(key, getattr(config, key)) != getattr(config, key) and config.init_from != "resume":
            say(f"note: {config.out_dir} holds a run that goes on from update {resumed.step:,}; {key} was {saved[key]} there and is {getattr(config, key)} now: {means} "
                "(another --out_dir starts a new run)")


def outlook(config: Config, step: int) -> str:
    """What is worth knowing of the updates that a run has before it."""
    if step >= config.max_iters:
        return f"; max_iters={config.max_iters:,}, so there is nothing left to train: a larger --max_iters goes on, another --out_dir starts a new run"
    if step >= config.lr_decay_iters and config.lr_schedule != "constant" and config.min_lr == 0:
        return (f"\nwarning: the learning rate is 0 in all {config.max_iters - step:,} updates to come, nothing will be learnt: "
                f"--lr_decay_iters={config.max_iters} --allow_change stretches the schedule")
    return ""


def keep_saved(config: Config, saved: dict[str, Any]) -> str | None:
    """Settings that nobody gave and that a longer max_iters must not move: a resumed run keeps the saved ones.

    Returns a sentence to say, or None.
    """
    if "lr_decay_iters" in config.given or config.lr_decay_iters == saved["lr_decay_iters"]:
        return None
    config.lr_decay_iters = saved["lr_decay_iters"]
    if config.lr_schedule == "constant":
        return None
    return (f"the learning rate still reaches min_lr at update {config.lr_decay_iters:,}, as when this run started; "
            "to stretch the schedule give --lr_decay_iters and --allow_change")


def compare_with_saved(config: Config, saved: dict[str, Any], where: str) -> list[tuple[str, Any, Any]]:
    """Checks a resumed run's settings against the checkpoint's; returns [(key, saved, now)] of allowed changes of the curve."""
    def changes(keys):
        return [(k, saved[k], getattr(config, k)) for k in keys if k in saved and saved[k] != getattr(config, k)]

    wrong = [f"{k} is {old} in {where} and {new} in this configuration: a checkpoint cannot change its architecture; "
             f"give {k}={old}, or another out_dir to start a new run" for k, old, new in changes(ARCHITECTURE) + changes(ADAPTERS)[:1]]
    if wrong:
        raise UserError(*wrong)
    curve = changes(CURVE + (["threads", "compile", "cp", "tp"] if config.deterministic else []))
    if curve and not config.allow_change:
        raise UserError(*[f"{k} was {old} in {where} and is {new} now, which changes the curve: give {k}={old} to go on with "
                          "the same run, or --allow_change to go on with another" for k, old, new in curve])
    return curve


def set_beyond_aside(run: str, resumed: ckpt.Checkpoint | None, config: Config, say: Say) -> None:
    """Moves what lies beyond the step a run goes on from out of its way: it belongs to another curve."""
    if not resumed and config.resume != "never":
        return
    beyond = [f"checkpoints/step_{s:08d}" for s in ckpt.list_steps(run) if not resumed or s > resumed.step]
    if not resumed:
        beyond += ["checkpoints/best", "metrics.jsonl", "loss.png", "config.json"]
    elif beyond and best_step(run) > resumed.step:
        beyond.append("checkpoints/best")
    if moved := ckpt.set_aside(run, beyond):
        if resumed and os.path.exists(os.path.join(run, "metrics.jsonl")):  # its later lines are about to be cut off
            shutil.copyfile(os.path.join(run, "metrics.jsonl"), os.path.join(moved, "metrics.jsonl"))
        say(f"what {run} held of an earlier curve is now in {moved}")


def best_step(run: str) -> int:
    """The step of the checkpoint kept as best, -1 where there is none."""
    try:
        return ckpt.Checkpoint(os.path.join(run, "checkpoints", "best")).step
    except ckpt.Damaged:
        return -1
