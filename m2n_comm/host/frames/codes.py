"""Authentication codes of frames in compiled code, by the OpenSSL that Python is linked to.

Owns the calls of its EVP interface, and the words of one direction of a connection. The codes, and
the count that numbers them, are those of session.Codes, which makes them where that OpenSSL cannot
be found. Used by tcp_frames.py, in ops that send and read frames.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd.lanes import read_i64, write_i64
from kernels.cpu.simd.system import call_function

if TYPE_CHECKING:
    from m2n_comm.pairing.session import Codes

_BEGIN, _ADD, _FINISH, _CONTROL, _CONTEXT, _COUNT, _NONCE, _, _LENGTH, _, CODE, _ = range(0, 96, 8)
_NUM_WORDS: Final = 12
_GET_TAG: Final = 0x10  # EVP_CTRL_AEAD_GET_TAG
_CODE_BYTES: Final = 16


class _OpenSsl(NamedTuple):
    """Functions of libcrypto."""

    new: Any
    free: Any
    cipher: Any
    begin: Any
    add: Any
    finish: Any
    control: Any


@cache
def _openssl() -> _OpenSsl | None:
    """Return the functions of the library that Python's ssl module is linked to, if it has any."""
    try:
        import _ssl

        library = ctypes.CDLL(_ssl.__file__)
        names = ("CTX_new", "CTX_free", "CTX_ctrl")
        new, free, control = (getattr(library, f"EVP_CIPHER_{name}") for name in names)
        begin, add, finish = (
            getattr(library, f"EVP_Encrypt{name}") for name in ("Init_ex", "Update", "Final_ex")
        )
        cipher = library.EVP_aes_256_gcm
    except (ImportError, AttributeError, OSError):
        return None
    new.restype = cipher.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    begin.argtypes = [ctypes.c_void_p] * 5
    return _OpenSsl(new, free, cipher, begin, add, finish, control)


class CodeWords:
    """The words that make the codes of `codes`, from its next one on; see make()."""

    def __init__(self, library: _OpenSsl, codes: Codes) -> None:
        context = library.new()
        self._freed = weakref.finalize(self, library.free, context)
        library.begin(context, library.cipher(), None, codes.key, None)
        words = self.words = array("Q", bytes(8 * _NUM_WORDS))
        functions = (library.begin, library.add, library.finish, library.control)
        for position, function in enumerate(functions):
            words[position] = ctypes.cast(function, ctypes.c_void_p).value or 0
        words[_CONTEXT // 8] = context
        self._count = codes.count
        words[_COUNT // 8] = codes.count.buffer_info()[0]
        self.address: int = words.buffer_info()[0]


def make(codes: Codes) -> CodeWords | None:
    """Return the words for compiled code; None where Python has no OpenSSL to share."""
    library = _openssl()
    return None if library is None else CodeWords(library, codes)


@inlined
def begin_code(words: int) -> None:
    """Begin the next code."""
    count_at = read_i64(words + _COUNT)
    write_i64(words + _NONCE, read_i64(count_at))
    write_i64(count_at, read_i64(count_at) + 1)
    begin, context = read_i64(words + _BEGIN), read_i64(words + _CONTEXT)
    call_function(begin, context, 0, 0, 0, words + _NONCE)


@inlined
def add_to_code(words: int, address: int, size: int) -> None:
    """Add bytes to the content that the code is of."""
    add, context = read_i64(words + _ADD), read_i64(words + _CONTEXT)
    call_function(add, context, 0, words + _LENGTH, address, size)


@inlined
def finish_code(words: int) -> None:
    """Write the code to the two words at CODE."""
    finish, context = read_i64(words + _FINISH), read_i64(words + _CONTEXT)
    call_function(finish, context, words + CODE, words + _LENGTH, 0, 0)
    control = read_i64(words + _CONTROL)
    call_function(control, context, _GET_TAG, _CODE_BYTES, words + CODE, 0)
