"""Malicious pickles: no code in them may run, whatever the opcodes."""

import builtins
import collections
import contextlib
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sparring.data import safe_pickle
from sparring.errors import UserError


class Call:
    """Pickles as a call of `function` on `args`."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def loads(data):
    return safe_pickle.loads(data, name="batch")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4, dtype=">i4"),
        np.array([True, False]),
        np.zeros((0, 3), dtype=np.float32),
        np.array(5, dtype=np.int64),
    ],
)
def test_arrays_round_trip(array, protocol):
    got = loads(pickle.dumps({"data": [array, (1, 2.5, None, True, "a", b"b")]}, protocol=protocol))
    assert np.array_equal(got["data"][0], array) and got["data"][0].dtype == array.dtype
    assert got["data"][1][:5] == (1, 2.5, None, True, "a")


def test_a_python_2_batch_like_the_official_ones():
    data = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x06abcdeftbU\x06labelsq\x08]q\x09(K\x06K\x09eu."
    )
    got = loads(data)
    assert got[b"labels"] == [6, 9]
    assert got[b"data"].tolist() == [[97, 98, 99], [100, 101, 102]] and got[b"data"].dtype == np.uint8


def traps(marker: Path):
    command = f"touch {marker}"
    os_system = pickle.dumps(Call(os.system, command))
    yield "posix.system", os_system
    yield "os.system by name", b"cos\nsystem\n(S'" + command.encode() + b"'\ntR."
    yield "INST opcode", b"(S'" + command.encode() + b"'\nios\nsystem\n."
    yield "builtins.eval", pickle.dumps(Call(eval, f"open({str(marker)!r}, 'w')"))
    yield "builtins.exec", pickle.dumps(Call(exec, f"open({str(marker)!r}, 'w')"))
    yield "builtins.open", pickle.dumps(Call(open, str(marker), "w"))
    yield "python 2 name", b"c__builtin__\neval\n(S'1'\ntR."
    yield "getattr", b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR."
    yield "subprocess", pickle.dumps(Call(subprocess.Popen, ["touch", str(marker)]))
    yield "nested in a list", pickle.dumps({"data": [[[Call(os.system, command)]]]})
    yield "as a dict key", pickle.dumps({Call(os.system, command): 1})
    yield "in an array's state", pickle.dumps(np.array([Call(os.system, command)], dtype=object))
    yield "beside a good array", pickle.dumps([np.zeros(3), Call(os.system, command)])
    yield "dotted name", b"\x80\x04\x8c\x05numpy\x8c\x14ndarray.__class__.mro\x93."
    yield "numpy load", b"cnumpy\nload\n(S'x'\ntR."
    yield "numpy scalar", pickle.dumps(np.float64(1.0))
    yield "f2py and distutils", b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n}tR."
    yield "codecs decode", b"c_codecs\ndecode\n(S'x'\nS'unicode_escape'\ntR."
    yield "bytes of a size", b"c__builtin__\nbytes\n(I1000000000000\ntR."
    yield "other encoding", b"\x80\x03c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00idna_\x86R."
    yield "ndarray called", b"cnumpy\nndarray\n(I4\ntR."
    yield "ndarray by NEWOBJ", b"\x80\x02cnumpy\nndarray\nK\x04\x85\x81."
    yield "a subclass of ndarray", pickle.dumps(np.ma.masked_array([1], [0]))
    yield "reconstruct of dtype", b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(tS'b'\ntR."
    yield "global changed by BUILD", b"cnumpy\ndtype\n}S'kind'\nS'encode'\nsb."
    yield "global left over", b"cnumpy\ndtype\n."
    yield "dtype of objects", b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR."
    yield "dtype with fields", pickle.dumps(np.zeros(2, dtype=[("a", "i4")]))
    yield "dtype left over", pickle.dumps(np.dtype("u1"))
    yield "array without state", b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR."
    yield "persistent id", b"Pabc\n."
    yield "set", pickle.dumps({1, 2})
    yield "complex", pickle.dumps(1j)
    yield "ordered dict", pickle.dumps(collections.OrderedDict(a=1))
    yield "bytearray", pickle.dumps(bytearray(b"x"), protocol=5)
    yield "a list in itself", b"]q\x00h\x00a."
    yield "huge memo", b"Nr\xff\xff\xff\x7f."
    yield "huge memo in text", b"Np9999999999\n."
    yield "extension code", b"\x82\x01."


@pytest.mark.parametrize("name", [name for name, _ in traps(Path("x"))])
def test_malicious_pickles_are_refused_and_never_run(name, tmp_path):
    marker = tmp_path / "ran"
    data = dict(traps(marker))[name]
    with pytest.raises(UserError, match=r"batch (was refused|is not a readable pickle)"):
        loads(data)
    assert not marker.exists()


def test_refusal_names_the_global():
    with pytest.raises(UserError, match=f"the global {os.system.__module__}.system"):
        loads(pickle.dumps(Call(os.system, "true")))
    with pytest.raises(UserError, match=r"the global builtins.eval"):
        loads(pickle.dumps(Call(builtins.eval, "1")))


def state_of(array, **changes):
    """An array's pickle with parts of its state replaced."""

    class Lying:
        def __reduce__(self):
            function, args, state = array.__reduce__()
            parts = dict(zip(("version", "shape", "dtype", "fortran", "values"), state, strict=True)) | changes
            return function, args, tuple(parts.values())

    return pickle.dumps(Lying())


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (10**9,)},
        {"shape": (-1, -3)},
        {"shape": (3.0,)},
        {"shape": "abc"},
        {"values": [1, 2, 3]},
        {"values": "abc"},
        {"dtype": "u1"},
        {"fortran": "yes"},
    ],
)
def test_inconsistent_arrays_are_refused(changes):
    with pytest.raises(UserError, match="was refused"):
        loads(state_of(np.zeros(3, dtype=np.uint8), **changes))


def test_every_truncation_ends_in_a_clear_error():
    whole = pickle.dumps({"data": np.arange(20, dtype=np.uint8), "labels": [1, 2, 3]}, protocol=2)
    for end in range(len(whole)):
        with pytest.raises(UserError):
            loads(whole[:end])


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_random_damage_raises_only_clear_errors():
    rng = np.random.default_rng(0)
    whole = pickle.dumps({"data": np.arange(20, dtype=np.uint8), "labels": [1, 2, 3]}, protocol=2)
    for _ in range(2000):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            damaged[at] = rng.integers(0, 256)
        with contextlib.suppress(UserError):
            loads(bytes(damaged))
