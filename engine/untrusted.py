"""Files that a stranger may have written: JSON and pickles, looked at before they are read, in memory that follows their size.

A pickle is a program. Its opcodes are walked here without being executed; only one that builds plain values, and calls nothing but what the
caller names, is handed on to be loaded.
"""

import io
import json
import os
import pickle
import pickletools
import zipfile
from collections.abc import Collection
from typing import Any

from engine.errors import UserError

# Of a JSON file or a pickle that describes something: a list of 16 bytes of text can take 60 in memory, so 8 MB of text are half a GB at worst
LARGEST = 8_000_000

# Opcodes that put numbers, texts, lists, dicts and tuples together. BYTEARRAY8 is not among them: it asks for memory before it reads.
PLAIN = set("PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE INT LONG LONG1 LONG4 BININT BININT1 BININT2 FLOAT BINFLOAT UNICODE BINUNICODE "
            "BINUNICODE8 SHORT_BINUNICODE EMPTY_LIST APPEND APPENDS LIST EMPTY_DICT SETITEM SETITEMS DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
            "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET".split())
CALLS = {"GLOBAL", "REDUCE", "BUILD", "BINPERSID"}  # as torch.save writes them, in protocol 2


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file, a dict. OSError where it cannot be read, ValueError where it is anything else."""
    data = read_bounded(path)
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def read_bounded(path: str) -> bytes:
    """A file's bytes. OSError where it cannot be read, ValueError where they are more than LARGEST."""
    with open(path, "rb") as f:
        data = f.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    return data


def check_pickle(data: bytes, calls: Collection[str] = ()) -> None:
    """ValueError unless a pickle, in bytes, builds plain values and calls nothing but `calls`, written as "module name".

    Lengths that are promised and not there, and memo numbers beyond the pickle's length, for which C's unpickler would make
    room at once, are refused too.
    """
    texts = ["", ""]  # the last two: what STACK_GLOBAL is about
    for op, argument, _ in pickletools.genops(io.BytesIO(data)):
        if op.name == "STACK_GLOBAL" or op.name == "GLOBAL" and argument not in calls:
            name = ".".join(texts) if op.name == "STACK_GLOBAL" else argument.replace(" ", ".")
            raise ValueError(f"it asks for {name[:100]}")
        if isinstance(argument, str):
            texts = [texts[1], argument]
        if op.name not in PLAIN and not (calls and op.name in CALLS):
            raise ValueError(f"it uses {op.name}, which plain values do not need")
        if op.name in ("PUT", "LONG_BINPUT", "FRAME") and argument > len(data):
            raise ValueError(f"its {op.name} of {argument} is beyond its {len(data)} bytes")


def read_plain_pickle(path: str) -> Any:
    """What a pickle of plain values holds. OSError where it cannot be read, ValueError or UnpicklingError where it is anything else."""
    data = read_bounded(path)
    check_pickle(data)
    return pickle.loads(data)  # nothing in it names a function


# What a file of torch.save needs to describe tensors in plain containers
TORCH_CALLS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
               *(f"torch {kind}Storage" for kind in "Float Half BFloat16 Double Long Int Short Char Byte Bool".split())}


def load_torch(path: str) -> Any:
    """What a file of torch.save holds, its tensors mapped from the file. OSError where it cannot be read, else any Exception where it is not plain
    containers of tensors that lie in the file as they say."""
    import torch

    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        pickles = [e for e in entries if e.filename.endswith("data.pkl")]
        if len(pickles) != 1 or len({e.filename for e in entries}) != len(entries):
            raise ValueError("it does not have one data.pkl")
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > os.path.getsize(path):
            raise ValueError("it is compressed, which torch.save does not do")
        if pickles[0].file_size > LARGEST:
            raise ValueError(f"its data.pkl has more than {LARGEST:,} bytes")
        check_pickle(archive.read(pickles[0]), TORCH_CALLS)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def refuse(path: str, what: str, error: Exception) -> UserError:
    """The UserError for a file that is not `what` it should be, as `error` says."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return UserError(f"{path} is not {what}: {reason}")
