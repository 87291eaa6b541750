"""Codes of compiled code against AES-GCM of the package cryptography."""

from __future__ import annotations

import os
from array import array

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kernels.cpu.compiled.runtime import Kernel, make_callable, offsets
from kernels.cpu.simd.lanes import read_i64
from m2n_comm.host.frames.codes import CODE, CodeWords, add_to_code, begin_code, finish_code, make
from m2n_comm.pairing.session import Codes

WORDS, AT, FIRST, REST = offsets(4)


@Kernel
def code_of_two(block: int) -> None:
    """Make the next code, of FIRST and then REST bytes that begin at AT."""
    words, at, first = read_i64(block + WORDS), read_i64(block + AT), read_i64(block + FIRST)
    begin_code(words)
    add_to_code(words, at, first)
    add_to_code(words, at + first, read_i64(block + REST))
    finish_code(words)


def next_code(words: CodeWords, data: bytes, first: int) -> bytes:
    content = array("B", data or b"?")
    at = content.buffer_info()[0]
    block = array("q", [*[0] * (WORDS // 8), words.address, at, first, len(data) - first])
    make_callable(code_of_two.address)(block.buffer_info()[0])
    return words.words[CODE // 8 :].tobytes()


@pytest.mark.parametrize("size", [0, 1, 16, 168, 4097, 70_000])
def test_codes_are_aes_gcm_s_and_count_with_those_of_python(size: int) -> None:
    key, data = os.urandom(32), os.urandom(size)
    codes = Codes(key)
    words = make(codes)
    assert words is not None, "the tests' Python has an OpenSSL"
    for count in range(6):
        want = AESGCM(key).encrypt(count.to_bytes(12, "little"), b"", data)
        is_compiled = count % 3 != 2
        got = next_code(words, data, size // 3) if is_compiled else codes.next([data])
        assert got == want, count
