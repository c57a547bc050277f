"""Read a pickle of arrays, bytes, numbers, strings, lists, tuples and dicts without running code from it.

`files.opcodes` reads it as data; the few calls that NumPy arrays need are carried out here, on plain bytes. So no
Python function, and not NumPy's own unpickling either, sees the file's data. Every other global is refused by name.
Must not know what the file is for.
"""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparring.errors import UserError
from sparring.files import opcodes
from sparring.files.opcodes import Call, Name, Refused
from sparring.files.regular import shown

_RECONSTRUCT = frozenset(Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core"))
_NDARRAY, _DTYPE_NAME = Name("numpy", "ndarray"), Name("numpy", "dtype")
_ALLOWED = _RECONSTRUCT | {_NDARRAY, _DTYPE_NAME, opcodes.ENCODE, opcodes.BYTES}
_DTYPE = re.compile(r"b1|[iu][1248]|f[248]")  # numbers only: no objects, no fields
_DEPTH = 20
_VALUES = 2**22  # values after every reference is followed, about 4 s: a list of lists of one list can be endless


@dataclass
class _Budget:
    """How many values may still be read."""

    left: int = _VALUES


def loads(data: bytes, *, name: str) -> Any:
    """The pickled value; `name` is the file name for errors. Python 2 strings become bytes."""
    try:
        return _plain(opcodes.load(io.BytesIO(data), allowed=lambda found: found in _ALLOWED), _DEPTH, _Budget())
    except Refused as error:
        raise UserError(
            f"{name} was refused: its pickle holds {shown(str(error), 120)}, and only arrays, bytes, numbers, strings, "
            "lists and dicts are read. Do not use this file; get it again from its official source."
        ) from None
    except Exception as error:  # a damaged pickle can raise almost anything
        raise UserError(f"{name} is not a readable pickle ({type(error).__name__}). Get it again.") from None


def _array(call: Call) -> NDArray[Any]:
    if not call.args or call.args[0] != _NDARRAY:
        raise Refused("a call of reconstruct that no array needs")
    if not isinstance(call.state, tuple) or len(call.state) != 5:
        raise Refused("an array without its values")
    _, shape, dtype, fortran, values = call.state
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused("an array of impossible shape")
    if not isinstance(dtype, Call) or not isinstance(values, bytes) or type(fortran) not in (bool, int):
        raise Refused("an array that is not plain numbers")
    kind = _dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(values):
        raise Refused("an array whose shape does not fit its values")
    return np.frombuffer(values, dtype=kind).reshape(shape, order="F" if fortran else "C").copy()


def _dtype(call: Call) -> np.dtype[Any]:
    code = call.args[0] if call.name == _DTYPE_NAME and call.args else None
    text = code.decode("latin-1") if isinstance(code, bytes) else code
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise Refused("an array of a type that is not numbers")
    order: object = "="
    if call.state is not None:
        # (version, byte order, subtype, names, fields, size, alignment, flags); the middle is None for plain numbers
        state = call.state
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise Refused("an array type with fields")
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
    if not isinstance(order, str) or order not in ("<", ">", "=", "|"):
        raise Refused("an unknown byte order")
    return np.dtype(order + text)


def _plain(value: object, depth: int, budget: _Budget) -> Any:
    """The value with its arrays and bytes built; any other type is refused."""
    budget.left -= 1
    if depth == 0 or budget.left < 0:
        raise Refused("values nested too deep")
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Call) and value.name in _RECONSTRUCT:
        return _array(value)
    if type(value) is list:
        return [_plain(item, depth - 1, budget) for item in value]
    if type(value) is tuple:
        return tuple(_plain(item, depth - 1, budget) for item in value)
    if type(value) is dict:
        return {_key(key): _plain(item, depth - 1, budget) for key, item in value.items()}
    raise Refused(f"a value of type {type(value).__name__}")


def _key(key: object) -> object:
    if type(key) not in (bool, int, float, str, bytes):
        raise Refused(f"a dict key of type {type(key).__name__}")
    return key
