"""The control plane's wire format, checked with an independent MessagePack."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.topspin.plans import plan
from topspin import messages
from topspin.errors import ProtocolError
from topspin.expert_table import uniform_table
from topspin.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    AnyMessage,
    ClockPing,
    ClockPong,
    CompileGrammar,
    DraftCounts,
    EngineState,
    ExpertCounts,
    ExpertPeer,
    Goodbye,
    GrammarLost,
    GrammarReady,
    Halt,
    Halted,
    Hello,
    Leaving,
    Loaded,
    MicroBatch,
    NewSequence,
    NodeCount,
    NodeTrace,
    Outputs,
    PrepareTable,
    Progress,
    Ready,
    Reform,
    Refused,
    ReleaseGrammar,
    RequestFailed,
    RequestOutput,
    RequestQueued,
    SamplingParams,
    Stats,
    StatsQuery,
    StepFailed,
    StepPlan,
    StepResult,
    StepTicket,
    StepTimings,
    Stop,
    TablePrepared,
    TokenLogprobs,
    Topology,
    Trace,
    TraceDump,
    TraceQuery,
    TraceRequest,
    TreeOffer,
    TreeOffers,
    Verdict,
    Verdicts,
    Welcome,
    decode,
    encode,
    pack_ints,
    unpack_ints,
)
from topspin.plan.precision import PrecisionRule
from topspin.plan.spec import NodeSpec

SAMPLING = SamplingParams(
    max_tokens=5,
    seed=2**64 - 1,
    choice=2,
    temperature=0.5,
    logit_bias={7: -100.0, 49151: 2.5},
    stop_token_ids=(1, 2),
    eos_token_ids=(0,),
    logprobs=0,
)
TICKET = StepTicket(
    step=9,
    previous=8,
    generation=1,
    table_version=2,
    num_micro_batches=2,
    participants=(0, 1),
    row_buckets=(16, 8),
)
TOPOLOGY = Topology(
    table=uniform_table(num_layers=2, num_experts=5, num_nodes=2),
    experts=(ExpertPeer(address="tcp:h:1", incarnation=3), None),
    attention_incarnations=(4, None),
    generation=3,
)
EXAMPLES: tuple[AnyMessage, ...] = (
    TraceRequest(query_id=1, seconds=2.0),
    ClockPing(query_id=1, sent_ns=2**40),
    ClockPong(query_id=1, sent_ns=2**40, node_ns=2**41),
    TraceQuery(query_id=1, seconds=2.0),
    TraceDump(query_id=1, records=b"\0" * 24),
    Trace(
        query_id=1,
        nodes=(NodeTrace(role="expert", index=1, offset_ns=-5, error_ns=3, records=b"\0" * 24),),
        missing=("attention 0",),
    ),
    Hello(role="expert", index=1, incarnation=2**62, revision="0.1.0", data_address="unix:@x"),
    Welcome(
        config=plan(
            path="/m",
            dtype="float32",
            max_model_len=9,
            quantization="int8",
            transport="tcp",
            gbps=1.5,
            num_threads=2,
        ).for_node("expert"),
        topology=TOPOLOGY,
        joins_late=True,
    ),
    Leaving(role="expert", index=1),
    Loaded(role="attention", index=0, num_blocks=100, num_frames=90, load_s=0.25),
    Halt(generation=2),
    Halted(role="expert", index=1, generation=2),
    Reform(topology=TOPOLOGY),
    Refused(reason="index 3 is taken"),
    Ready(role="attention", index=0, num_blocks=100, load_s=0.25),
    Stop(reason="SIGTERM"),
    Goodbye(role="attention", index=0, code="config_error", message="no memory"),
    AddRequest(request_id="r-1", prompt=pack_ints([1, 2, 3]), sampling=SAMPLING, cache_salt="t"),
    AbortRequest(request_id="r-1"),
    Outputs(
        outputs=(
            RequestOutput(
                request_id="r-1",
                index=4,
                token_ids=(10, 0),
                logprobs=(TokenLogprobs(-0.5, (10, 11), (-0.5, -1.25)), TokenLogprobs(-1.0)),
                finish_reason="stop",
                stop_token_id=0,
                num_cached_tokens=16,
            ),
        )
    ),
    RequestQueued(request_ids=("r-1",)),
    RequestFailed(request_id="r-1", code="node_lost", status=503, message="expert 1"),
    EngineState(state="ready", max_request_tokens=2048),
    StatsQuery(query_id=1),
    Stats(
        query_id=1,
        num_waiting=0,
        num_running=1,
        kv_cache_usage=0.5,
        num_blocks=10,
        prefix_cache_queries=2,
        prefix_cache_hits=1,
        num_preemptions=0,
        num_steps=3,
        prompt_tokens=4,
        generation_tokens=5,
        step_seconds=0.125,
        kv_frames_usage=0.75,
        max_queued_requests=16,
        nodes=(NodeCount(role="expert", optional=True, planned=2, present=1),),
        expert_tokens=((1, 2), (3, 0)),
        expert_table_version=2,
        expert_migrations=7,
        expert_balance=1.25,
        expert_balance_before=1.5,
    ),
    TICKET,
    StepPlan(
        ticket=TICKET,
        finished=pack_ints([3]),
        new=(
            NewSequence(
                seq_id=4,
                tokens=pack_ints([5, 6]),
                num_prompt_tokens=2,
                num_computed=0,
                blocks=b"",
                max_length=7,
                sampling=SAMPLING,
            ),
        ),
        micro_batches=(
            MicroBatch(
                seq_ids=pack_ints([4]),
                num_tokens=pack_ints([2]),
                wanted=b"\x03",
                block_counts=pack_ints([1]),
                block_ids=pack_ints([0]),
                max_draft=pack_ints([3]),
            ),
        ),
    ),
    StepResult(
        step=9,
        generation=1,
        index=0,
        seq_ids=pack_ints([4]),
        tokens=pack_ints([77, 78]),
        counts=pack_ints([2]),
        timings=StepTimings(total_s=0.5, attention_s=0.25, wait_s=0.125, sample_s=0.0),
        logprobs={4: (TokenLogprobs(-0.5), TokenLogprobs(-0.25))},
        prompt_logprobs={6: (TokenLogprobs(-1.5, (3,), (-0.5,), rank=2),)},
        errors={5: "no finite logit"},
    ),
    Progress(step=7, generation=2, role="attention", index=1),
    CompileGrammar(key="ab", grammar="start: /a+/"),
    GrammarReady(index=1, key="ab", error="too large"),
    GrammarLost(index=1, key="ab", error="too complex"),
    ReleaseGrammar(key="ab"),
    StepFailed(step=9, generation=1, role="expert", index=1, code="peer_lost", message="gone"),
    ExpertCounts(
        index=0,
        table_version=1,
        counts=(pack_ints([4, 0]),),
        activations=3,
        batches=2,
        compute_s=0.5,
    ),
    PrepareTable(table=uniform_table(num_layers=1, num_experts=3, num_nodes=2, num_redundant=2)),
    TablePrepared(role="expert", index=1, version=2),
    TablePrepared(role="expert", index=1, version=2, refusal="no memory"),
    Verdicts(
        epoch=5,
        step_s=0.25,
        verdicts=(Verdict(seq_id=4, start=2, tokens=pack_ints([7, 8]), at_most=3),),
        ended=pack_ints([1]),
    ),
    TreeOffers(
        epoch=5,
        offers=(
            TreeOffer(
                seq_id=4,
                root=8,
                tokens=pack_ints([9, 3]),
                parents=pack_ints([-1, -1]),
                logps=(-0.5, -2.0),
            ),
        ),
        unknown=pack_ints([6]),
    ),
    DraftCounts(
        index=0,
        num_root_hits=3,
        num_root_misses=1,
        num_passes=8,
        num_overlapped=6,
        pass_seconds=0.5,
    ),
)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(AnyMessage))
    declared = {
        value
        for value in vars(messages).values()
        if isinstance(value, type)
        and issubclass(value, messages.Message)
        and value is not messages.Message
    }
    assert declared == set(get_args(AnyMessage))


def test_every_message_is_read_and_written_as_another_msgpack_does() -> None:
    """By field names: a tag or a type shared by two messages would not come back."""
    for message in EXAMPLES:
        fields = msgpack.unpackb(encode(message), strict_map_key=False)
        assert fields == _plain(message)
        again = decode(msgpack.packb(fields))
        assert type(again) is type(message)
        assert again == message


def _plain(value: Any) -> Any:
    """Return `value` as a map of its fields by name, tuples as arrays.

    The nodes and the precision rules of an engine plan, and outputs, leave their defaults out.
    """
    if isinstance(value, msgspec.Struct):
        tag = {"type": type(value).__name__} if isinstance(value, messages.Message) else {}
        if isinstance(value, NodeSpec):
            tag = {"role": value.role}
        is_short = isinstance(value, NodeSpec | PrecisionRule | RequestOutput)
        return tag | {
            field.name: _plain(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
            if not (is_short and getattr(value, field.name) == field.default)
        }
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def test_golden_bytes_of_a_ticket() -> None:
    """The form on the wire; when it changes, so does PROTOCOL_VERSION."""
    assert PROTOCOL_VERSION == 10
    golden = (
        b"\x88\xa4type\xaaStepTicket\xa4step\x09\xa8previous\x08\xaageneration\x01"
        b"\xadtable_version\x02\xb1num_micro_batches\x02\xacparticipants\x92\x00\x01"
        b"\xabrow_buckets\x92\x10\x08"
    )
    assert encode(TICKET) == golden
    assert decode(golden) == TICKET


def test_golden_bytes_of_a_request() -> None:
    request = AddRequest(
        request_id="r", prompt=pack_ints([1, 258]), sampling=SamplingParams(max_tokens=3, seed=4)
    )
    golden = msgpack.packb(
        {
            "type": "AddRequest",
            "request_id": "r",
            "prompt": b"\x01\x00\x00\x00\x02\x01\x00\x00",
            "sampling": {
                "max_tokens": 3,
                "seed": 4,
                "choice": 0,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "logit_bias": {},
                "min_tokens": 0,
                "stop_token_ids": [],
                "eos_token_ids": [],
                "logprobs": None,
                "prompt_logprobs": None,
                "kv_retrieval_tokens": None,
                "grammar": "",
                "allowed_token_ids": [],
                "bad_words": [],
            },
            "cache_salt": "",
            "priority": 0,
            "replayed": False,
            "output": b"",
            "num_scored": 0,
        }
    )
    assert encode(request) == golden


def test_a_wrong_field_is_a_protocol_error() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"type": "StepTickets"}, "StepTickets"),
        ({"type": 3}, "type"),
        ({"step": "9"}, "step"),
        ({"participants": [0, "1"]}, "participants"),
        ({"colour": 1}, "colour"),
        ({"row_buckets": None}, "row_buckets"),
    ]
    for change, reason in cases:
        fields = msgpack.unpackb(encode(TICKET)) | change
        with pytest.raises(ProtocolError, match=reason):
            decode(msgpack.packb(fields))


def test_a_generation_has_room_for_the_next_ones() -> None:
    hello = Hello(role="expert", index=0, incarnation=1, revision="1", generation=2**53)
    assert decode(encode(hello)) == hello
    for outside in (-1, 2**53 + 1, 2**64 - 1):
        with pytest.raises(ProtocolError, match="generation"):
            decode(encode(msgspec.structs.replace(hello, generation=outside)))


def test_a_missing_field_is_a_protocol_error() -> None:
    cases: list[str] = ["type", "step", "row_buckets"]
    for missing in cases:
        fields = msgpack.unpackb(encode(TICKET))
        del fields[missing]
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(fields))


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
    (welcome,) = (each for each in EXAMPLES if isinstance(each, Welcome))
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


@given(st.sampled_from(EXAMPLES), st.data())
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


@given(st.sampled_from(EXAMPLES), st.data())
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
    cases: list[int] = [2**31, -(2**31) - 1]
    for value in cases:
        with pytest.raises(OverflowError):
            pack_ints([value])


@given(st.binary(max_size=41).filter(lambda data: len(data) % 4))
def test_a_part_of_an_integer_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="multiple of 4"):
        unpack_ints(data)
