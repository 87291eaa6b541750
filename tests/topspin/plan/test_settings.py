"""The settings: what each says of itself, and the batch of each kind of device."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tests.topspin.plans import with_setting
from topspin.errors import ConfigError
from topspin.plan.setting import check_ranges, fields_of
from topspin.plan.settings import EngineConfig, ModelSection, SchedulerSection


def test_every_setting_says_what_it_is() -> None:
    fields = {
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(EngineConfig)
        for field in msgspec.structs.fields(section.type)
    }
    assert {field.key for field in fields_of(EngineConfig)} == fields - {"model.path"}


def test_every_number_has_a_range() -> None:
    check_ranges(EngineConfig(model=ModelSection(path="tiny")))
    for field in fields_of(EngineConfig):
        if {int, float} & {field.type, *get_args(field.type)}:
            low, high = field.setting.within
            bound = field.setting.above if low is None else low
            assert bound is not None, field.key
            kind = type(field.default or 1)
            for value in (bound - 1, *([] if high is None else [high + 1])):
                with pytest.raises(ConfigError, match=f"^{field.shown_name} "):
                    check_ranges(with_setting(field.key, kind(value)))


def test_a_value_out_of_range_is_refused_by_its_name() -> None:
    cases: list[tuple[str, object, str]] = [
        ("topology.attention_nodes", 0, "--attention-nodes 0: must be between 1 and 1024"),
        ("m2n.window_rows", 65536, "m2n.window_rows 65536: must be between 1 and 65535"),
        ("m2n.link_latency_us", -0.5, "m2n.link_latency_us -0.5: must be a finite number and at"),
        ("m2n.link_latency_us", float("inf"), "m2n.link_latency_us inf"),
        ("m2n.link_gbps", float("nan"), "m2n.link_gbps nan"),
        ("m2n.deadline_s", 0.0, "m2n.deadline_s 0: must be a finite number and above 0"),
        ("cache.gpu_memory_utilization", 1.5, "--gpu-memory-utilization 1.5: must be a finite"),
    ]
    for setting, value, refusal in cases:
        with pytest.raises(ConfigError) as raised:
            check_ranges(with_setting(setting, value))
        assert str(raised.value).startswith(refusal)


def test_a_gpu_runs_larger_batches_unless_told() -> None:
    told = SchedulerSection(max_num_seqs=7)
    assert SchedulerSection().batch_limits(is_gpu=False) == (64, 512)
    assert SchedulerSection().batch_limits(is_gpu=True) == (256, 8192)
    assert told.batch_limits(is_gpu=True) == (7, 8192)


def test_nobody_changes_a_section() -> None:
    config = EngineConfig(model=ModelSection(path="tiny"))
    with pytest.raises(AttributeError):
        config.gateway.port = 1  # type: ignore[misc]
