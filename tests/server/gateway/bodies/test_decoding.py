"""Long lists are decoded piece by piece, with the same values and errors as at once."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gateway.bodies.decoding import decode, decode_each, decode_pieces
from server.gateway.bodies.fields import Count
from server.gateway.dialects.chat.request import ChatMessage
from topspin.errors import InvalidRequest


@given(
    numbers=st.lists(st.integers(0, 2**31 - 1), max_size=12),
    separator=st.sampled_from([",", ", ", " ,\n"]),
    piece_bytes=st.integers(0, 20),
)
def test_pieces_are_the_list(numbers: list[int], separator: str, piece_bytes: int) -> None:
    data = f"[ {separator.join(map(str, numbers))}]".encode()
    assert json.loads(data) == numbers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.gateway.bodies.decoding.PIECE_BYTES", piece_bytes)
        pieces = list(decode_pieces(data, list[Count], param="p"))
    assert [number for piece in pieces for number in piece] == numbers
    assert len(pieces) >= len(data) // (piece_bytes + 20)


@pytest.mark.parametrize("wrong", ["-1", "1.5", '"a"', "null", "[1]"])
def test_a_wrong_number_is_named_by_its_place(wrong: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        list(decode_pieces(f"[1,{wrong},3]".encode(), list[Count], param="prompt"))
    assert raised.value.param == "prompt[1]"


def test_a_wrong_number_of_a_later_piece_is_named_by_the_pieces_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.gateway.bodies.decoding.PIECE_BYTES", 4)
    with pytest.raises(InvalidRequest) as raised:
        list(decode_pieces(b"[0,1,2,3,4,-5]", list[Count], param="prompt"))
    assert raised.value.param == "prompt[3:][2]"


def test_a_wrong_item_is_named_as_in_the_whole() -> None:
    texts = ['{"role":"user"}', '{"role":"user","content":"a","tool_calls":[{"id":1}]}']
    items = [msgspec.Raw(text) for text in texts]
    with pytest.raises(InvalidRequest) as each:
        decode_each(items, ChatMessage, param="messages")
    whole = f'{{"messages":[{",".join(texts)}]}}'.encode()
    with pytest.raises(InvalidRequest) as at_once:
        decode(whole, dict[str, list[ChatMessage]])
    assert each.value.param == "messages[1].tool_calls[0].id"
    assert str(at_once.value).endswith(str(each.value).partition(": ")[2])


@pytest.mark.parametrize(
    "lone", ["\\ud83d", "\\uDE00", "\\ude00\\ud83d", "\\ud83d\\u0041", "\\ud83d "]
)
@pytest.mark.parametrize("place", ['{"a": "%s"}', '{"%s": 1}', '["x%s\\\\"]'])
def test_lone_surrogates_are_called_so(lone: str, place: str) -> None:
    data = (place % ("\\ud83d\\ude00" + lone)).encode()
    with pytest.raises(InvalidRequest, match=r"the lone surrogate \\u[dD]") as raised:
        decode(data, object)
    assert raised.value.param is None
    with pytest.raises(InvalidRequest, match=r"`messages\[0\]` is not valid Unicode"):
        decode_each([msgspec.Raw(data)], object, param="messages")


def test_what_only_looks_like_one_is_not_called_so() -> None:
    for data in (b'{"a": "\\\\ud83d"', b'{"a": "\\ud83d\\ude00"'):
        with pytest.raises(InvalidRequest, match="truncated"):
            decode(data, object)
