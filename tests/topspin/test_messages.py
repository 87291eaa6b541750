"""The control plane's wire format, checked with an independent MessagePack."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect as kinds

from tests.topspin.plans import plan
from topspin import messages
from topspin.errors import ProtocolError
from topspin.expert_table import uniform_table
from topspin.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    AnyMessage,
    Hello,
    SamplingParams,
    StepTicket,
    Topology,
    Welcome,
    decode,
    encode,
    pack_ints,
    unpack_ints,
)
from topspin.plan.spec import NodeConfig

TICKET = StepTicket(
    step=9,
    previous=8,
    generation=1,
    table_version=2,
    num_micro_batches=2,
    participants=(0, 1),
    row_buckets=(16, 8),
)
ASKED = plan(dtype="float32", quantization="int8", transport="tcp", gbps=1.5)
CONFIGS = [each.for_node(role) for each in (plan(), ASKED) for role in ("attention", "expert")]


def values(kind: kinds.Type) -> st.SearchStrategy[Any]:
    """Return a strategy of the values of a type, small ones; of a node's plan a few."""
    match kind:
        case kinds.StructType(cls=found) if found is NodeConfig:
            return st.sampled_from(CONFIGS)
        case kinds.StructType():
            parts = {field.name: values(field.type) for field in kind.fields}
            return st.builds(kind.cls, **parts)
        case kinds.UnionType():
            return st.one_of(map(values, kind.types))
        case kinds.VarTupleType():
            return st.lists(values(kind.item_type), max_size=2).map(tuple)
        case kinds.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case kinds.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=2)
        case kinds.LiteralType():
            return st.sampled_from(kind.values)
        case kinds.IntType():
            low, high = -(2**63), 2**64 - 1
            return st.integers(low if kind.ge is None else kind.ge, kind.le or high)
        case kinds.FloatType():
            low = kind.ge if kind.gt is None else kind.gt
            is_open = kind.gt is not None
            return st.floats(low, kind.le, exclude_min=is_open, allow_nan=False)
    plain = {
        kinds.StrType: st.text(max_size=5),
        kinds.BytesType: st.binary(max_size=8),
        kinds.BoolType: st.booleans(),
        kinds.NoneType: st.none(),
    }
    return plain[type(kind)]


MESSAGES = {each.__name__: values(kinds.type_info(each)) for each in get_args(AnyMessage)}
ANY_MESSAGE = st.one_of(MESSAGES.values())


def test_every_message_that_is_declared_can_be_sent() -> None:
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type)
        and issubclass(value, messages.Message)
        and value is not messages.Message
    }
    assert declared == set(get_args(AnyMessage))


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_is_read_and_written_as_another_msgpack_does(name: str) -> None:
    """By field names: a tag or a type shared by two messages would not come back."""

    @settings(max_examples=10)
    @given(MESSAGES[name])
    def check(message: AnyMessage) -> None:
        for fields in (
            msgpack.unpackb(encode(message), strict_map_key=False),
            _plain(message),
        ):
            again = decode(msgpack.packb(fields))
            assert type(again) is type(message)
            assert again == message

    check()


def _plain(value: Any) -> Any:
    """Return `value` as a map of its fields by name, tuples as arrays."""
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__
        fields = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
        return fields if tag.tag is None else {tag.tag_field: tag.tag} | fields
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def test_golden_bytes_of_a_ticket() -> None:
    """The form on the wire; when it changes, so does PROTOCOL_VERSION."""
    assert PROTOCOL_VERSION == 12
    golden = (
        b"\x88\xa4type\xaaStepTicket\xa4step\x09\xa8previous\x08\xaageneration\x01"
        b"\xadtable_version\x02\xb1num_micro_batches\x02\xacparticipants\x92\x00\x01"
        b"\xabrow_buckets\x92\x10\x08"
    )
    assert encode(TICKET) == golden
    assert decode(golden) == TICKET


def test_golden_bytes_of_a_request() -> None:
    sampling = SamplingParams(max_tokens=3, seed=4)
    request = AddRequest(request_id="r", prompt=pack_ints([1, 258]), sampling=sampling)
    golden = {
        "type": "AddRequest", "request_id": "r", "prompt": b"\1\0\0\0\2\1\0\0",
        "sampling": {
            "max_tokens": 3, "seed": 4, "choice": 0, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0, "stop_token_ids": [],
            "eos_token_ids": [], "logprobs": None, "prompt_logprobs": None,
            "logprob_token_ids": [],
            "kv_retrieval_tokens": None, "grammar": "", "allowed_token_ids": [], "bad_words": [],
        },
        "cache_salt": "", "priority": 0, "replayed": False, "output": b"", "num_scored": 0,
        "tenant": {}, "timeout_s": None,
    }  # fmt: skip
    assert encode(request) == msgpack.packb(golden)


def test_a_wrong_or_missing_field_is_a_protocol_error() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "StepTickets"}, "StepTickets"),
        ({"type": 3}, "type"),
        ({"step": "9"}, "step"),
        ({"participants": [0, "1"]}, "participants"),
        ({"colour": 1}, "colour"),
        ({"row_buckets": None}, "row_buckets"),
    ]
    fields = msgpack.unpackb(encode(TICKET))
    for change, reason in cases:
        with pytest.raises(ProtocolError, match=reason):
            decode(msgpack.packb(fields | change))
    for missing in ("type", "step", "row_buckets"):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb({name: fields[name] for name in fields if name != missing}))


def test_a_generation_has_room_for_the_next_ones() -> None:
    hello = Hello(role="expert", index=0, incarnation=1, revision="1", generation=2**53)
    assert decode(encode(hello)) == hello
    for outside in (-1, 2**53 + 1, 2**64 - 1):
        with pytest.raises(ProtocolError, match="generation"):
            decode(encode(msgspec.structs.replace(hello, generation=outside)))


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x91" * 100_000)  # an array in an array in an array ...
@example(b"\xdd\xff\xff\xff\xff")  # an array of 4 billion missing entries
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x81\xa4type\xa4Stop")
@example(b"\x82\xa4type\xa4Stop\xa6reason\xa1\xff")  # not UTF-8
@example(b"\x82\xa4type\xa4\xff\xff\xff\xff\xa6reason\xa0")
@example(b"\x82\xa4\xff\xff\xff\xff\xa4Stop\xa6reason\xa0")
def test_random_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("depth", [1, 300, 100_000])
@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\x91", b"\xdf\xff\xff\xff\xff\xa1a"])
def test_values_of_any_type_are_bounded_too(head: bytes, depth: int) -> None:
    """Lists and maps that claim 4 billion entries each, in each other: no memory is made for them.

    Overrides of a model's configuration are the only field that any value fits.
    """
    table = uniform_table(num_layers=2, num_experts=5, num_nodes=2)
    topology = Topology(table=table, experts=(None,), attention_incarnations=(4, None))
    welcome = Welcome(config=CONFIGS[-1], topology=topology)
    fields = msgpack.unpackb(encode(welcome), strict_map_key=False)
    fields["config"]["model"]["hf_overrides"] = {"a": "MARK"}
    bomb = msgpack.packb(fields).replace(msgpack.packb("MARK"), head * depth)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@settings(max_examples=50)
@given(ANY_MESSAGE, st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(
    message: AnyMessage, data: st.DataObject
) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode(bytes(encoded))
    except ProtocolError:
        return
    assert isinstance(again, get_args(AnyMessage))


@settings(max_examples=50)
@given(ANY_MESSAGE, st.data())
def test_a_cut_message_is_a_protocol_error(message: AnyMessage, data: st.DataObject) -> None:
    encoded = encode(message)
    with pytest.raises(ProtocolError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(st.lists(st.integers(min_value=-(2**31), max_value=2**31 - 1)))
def test_packed_integers_are_little_endian_int32(values: list[int]) -> None:
    packed = pack_ints(values)
    assert packed == struct.pack(f"<{len(values)}i", *values)
    assert list(unpack_ints(packed)) == values


def test_an_integer_that_does_not_fit_is_not_packed() -> None:
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError):
            pack_ints([value])


@given(st.binary(max_size=41).filter(lambda data: len(data) % 4))
def test_a_part_of_an_integer_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="multiple of 4"):
        unpack_ints(data)
