"""Read a pickle as data: no global is looked up, nothing is called, and every step is counted.

What the pickle would call is returned as a `Call` with its arguments, what lies outside of it as whatever `persistent`
makes of its reference; the reader of a format decides what they mean. Python's own unpickler can be made to end the
process (a key nested a million times) or to allocate gigabytes (a memo index of four bytes). Must not know any format.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

STEPS = 2**21  # opcodes of one pickle, about 4 s; a checkpoint of 1,000 tensors has 40,000, CIFAR-100 has 250,000
_VALUES = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "INT",
        "LONG",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "FLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "UNICODE",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ]
)
_STRINGS = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING"})  # of Python 2: bytes
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = (str, bytes, int, float, bool, type(None))


class Refused(Exception):
    """The pickle holds something that is not allowed; the message says what."""


@dataclass(frozen=True)
class Name:
    """A global that the pickle names; it is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        """As Python writes it: 'numpy.ndarray', and 'eval' of a built-in."""
        return self.name if self.module == "builtins" else f"{self.module}.{self.name}"


ENCODE, BYTES = Name("_codecs", "encode"), Name("builtins", "bytes")  # how older protocols write bytes


class ForbiddenName(Refused):
    """The pickle names something that is not allowed."""

    def __init__(self, name: Name) -> None:
        super().__init__(f"the global {name.module}.{name.name}")
        self.name = name


class Set(list[Any]):
    """A set of the pickle, as the list of its values."""


class Call:
    """A call that the pickle asks for; it is not made."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None


def load(file: BytesIO, *, allowed: Callable[[Name], bool], persistent: Callable[[Any], Any] | None = None) -> Any:
    """The next pickled value of the file; an OrderedDict is a dict.

    Raises:
        ForbiddenName: it names a global that is not allowed.
        Refused: it holds something else that is not allowed.
        Exception: it is damaged, in any of many ways.
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: dict[int, Any] = {}
    for step, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if step > STEPS:
            raise Refused(f"more than {STEPS} steps")
        code = opcode.name
        if code in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[_index(argument)] = stack[-1]
        elif code == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[_index(argument)])
        elif code in _VALUES:
            stack.append(argument)
        elif code in _STRINGS:
            stack.append(str(argument).encode("latin-1"))
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "EMPTY_SET":
            stack.append(Set())
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "MARK":
            below.append(stack)
            stack = []
        elif code in ("TUPLE", "LIST", "FROZENSET", "DICT", "APPENDS", "ADDITEMS", "SETITEMS", "POP_MARK"):
            items, stack = stack, below.pop()
            if code == "TUPLE":
                stack.append(tuple(items))
            elif code == "LIST":
                stack.append(items)
            elif code == "FROZENSET":
                stack.append(Set(items))
            elif code == "DICT":
                stack.append({})
                _set(stack[-1], items)
            elif code == "SETITEMS":
                _set(stack[-1], items)
            elif code != "POP_MARK":
                _list(stack[-1], Set if code == "ADDITEMS" else list).extend(items)
        elif code == "APPEND":
            item = stack.pop()
            _list(stack[-1]).append(item)
        elif code == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif code in _SHORT_TUPLES:
            cut = len(stack) - _SHORT_TUPLES[code]
            if cut < 0:
                raise Refused("a tuple of values that are not there")
            stack[cut:] = [tuple(stack[cut:])]
        elif code == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            stack.append(_named(module, name, allowed))
        elif code == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(_named(module, name, allowed))
        elif code in ("REDUCE", "NEWOBJ"):
            args, function = stack.pop(), stack.pop()
            stack.append(_called(function, args))
        elif code == "BUILD":
            state, built = stack.pop(), stack[-1]
            if isinstance(built, Call):
                built.state = state
            elif type(built) is not dict:  # of a dict, attributes: nothing of it is read
                raise Refused("a value that is changed after it was made")
        elif code in ("BINPERSID", "PERSID"):
            reference = stack.pop() if code == "BINPERSID" else argument
            if persistent is None:
                raise Refused("a persistent reference")
            stack.append(persistent(reference))
        elif code == "POP":
            stack.pop()
        elif code == "DUP":
            stack.append(stack[-1])
        elif code == "STOP":
            return stack.pop()
        elif code not in ("PROTO", "FRAME"):
            raise Refused(f"the opcode {code}")
    raise Refused("no end")


def _index(argument: Any) -> int:
    """The place in the memo; one beyond the longest pickle would make other readers allocate gigabytes."""
    if not 0 <= int(argument) <= STEPS:
        raise Refused("a memo larger than itself")
    return int(argument)


def _named(module: object, name: object, allowed: Callable[[Name], bool]) -> Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise Refused("a global without a name")
    found = Name({"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module), name)
    if not allowed(found):
        raise ForbiddenName(found)
    return found


def _called(function: object, args: object) -> Any:
    if not isinstance(function, Name) or not isinstance(args, tuple):
        raise Refused("a call of something that is not a name")
    if function == Name("collections", "OrderedDict"):
        made: dict[Any, Any] = {}
        for pair in _list(args[0]) if args else []:
            _set(made, list(pair))
        return made
    if function in (ENCODE, BYTES):
        return _encoded(function, args)
    return Call(function, args)


def _encoded(function: Name, args: tuple[Any, ...]) -> bytes:
    if function == BYTES and not args:
        return b""
    if function == ENCODE and len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    raise Refused(f"a call of {function} that no bytes need")


def _list(value: Any, kind: type[list[Any]] = list) -> list[Any]:
    if type(value) is not kind:
        raise Refused(f"values that are added to a {type(value).__name__}")
    found: list[Any] = value
    return found


def _set(target: object, items: list[Any]) -> None:
    if type(target) is not dict:
        raise Refused(f"a dict that is a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # A deeper key would be hashed by recursion, which can exhaust the stack of the process.
        if type(key) not in _PLAIN and not (type(key) is tuple and all(type(part) in _PLAIN for part in key)):
            raise Refused(f"a dict key of type {type(key).__name__}")
        target[key] = value
