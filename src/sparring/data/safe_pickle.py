"""Read a pickle of arrays, bytes, numbers, strings, lists, tuples and dicts without running code from it.

No global of a pickle is looked up: the few that NumPy arrays need are replaced by inert stand-ins that only store their
arguments, and the arrays are built from these afterwards. So no Python function, and not NumPy's own unpickling either,
sees the file's data. Every other global is refused by name. Must not know what the file is for.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.errors import UserError

_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "bytes",  # b"" in older protocols
}
_DTYPE = re.compile(r"b1|[iu][1248]|f[248]")  # numbers only: no objects, no fields
_DEPTH = 20


class _Refused(Exception):
    """The pickle holds something that is not allowed."""


class _Dtype:
    __slots__ = ("code", "order")

    def __init__(self, code: object) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not _DTYPE.fullmatch(text):
            raise _Refused(f"an array of type {text!r}")
        self.code, self.order = text, "="

    def __setstate__(self, state: object) -> None:
        # (version, byte order, subtype, names, fields, size, alignment, flags); the middle is None for plain numbers
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise _Refused("an array type with fields")
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if not isinstance(order, str) or order not in ("<", ">", "=", "|"):
            raise _Refused("an unknown byte order")
        self.order = order


class _Array:
    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def build(self) -> NDArray[Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise _Refused("an array without its values")
        _, shape, dtype, fortran, values = self.state
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise _Refused("an array of impossible shape")
        if not isinstance(dtype, _Dtype) or not isinstance(values, bytes) or type(fortran) not in (bool, int):
            raise _Refused("an array that is not plain numbers")
        kind = np.dtype(dtype.order + dtype.code)
        if math.prod(shape) * kind.itemsize != len(values):
            raise _Refused("an array whose shape does not fit its values")
        return np.frombuffer(values, dtype=kind).reshape(shape, order="F" if fortran else "C").copy()


class _StandIn:
    """The replacement of an allowed global: callable as in NumPy's pickles, and immutable."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __setstate__(self, state: object) -> None:
        raise _Refused("a changed global")

    def __call__(self, *args: object) -> object:
        if self.kind == "reconstruct" and args and isinstance(args[0], _StandIn) and args[0].kind == "ndarray":
            return _Array()
        if self.kind == "dtype" and args:
            return _Dtype(args[0])
        if self.kind == "encode" and len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
            return args[0].encode("latin-1")
        if self.kind == "bytes" and not args:
            return b""
        raise _Refused(f"a call of {self.kind} that no array needs")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise _Refused(f"the global {module}.{name}")
        return _StandIn(_GLOBALS[module, name])

    def persistent_load(self, pid: object) -> Any:
        raise _Refused("a persistent reference")


def loads(data: bytes, *, name: str) -> Any:
    """The pickled value; `name` is the file name for errors. Python 2 strings become bytes."""
    try:
        _check_memo(data)
        return _plain(_Reader(io.BytesIO(data), encoding="bytes").load(), _DEPTH)
    except _Refused as error:
        raise UserError(
            f"{name} was refused: its pickle holds {error}, and only arrays, bytes, numbers, strings, lists and dicts "
            "are read. Do not use this file; get it again from its official source."
        ) from None
    except Exception as error:  # a damaged pickle can raise almost anything
        raise UserError(f"{name} is not a readable pickle ({type(error).__name__}: {error}). Get it again.") from None


def _check_memo(data: bytes) -> None:
    """Refuse a memo index beyond the file's length: five bytes could make the reader allocate gigabytes."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) not in range(len(data)):
            raise _Refused("a memo larger than itself")


def _plain(value: object, depth: int) -> Any:
    """The value with stand-ins replaced by arrays; any other type is refused."""
    if depth == 0:
        raise _Refused("values nested too deep")
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, _Array):
        return value.build()
    if type(value) is list:
        return [_plain(item, depth - 1) for item in value]
    if type(value) is tuple:
        return tuple(_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return {_key(key): _plain(item, depth - 1) for key, item in value.items()}
    raise _Refused(f"a value of type {type(value).__name__}")


def _key(key: object) -> object:
    if type(key) not in (bool, int, float, str, bytes):
        raise _Refused(f"a dict key of type {type(key).__name__}")
    return key
