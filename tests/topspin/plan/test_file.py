"""Plans as YAML: what is printed is read as the same plan; what is no plan is refused by name."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from msgspec.structs import replace

from tests.structs import with_nodes
from tests.topspin.plans import DENSE, FACTS, plan
from topspin.errors import ConfigError
from topspin.plan.file import print_plan, read_plan
from topspin.plan.network import NetworkSpec
from topspin.plan.precision import PrecisionRule
from topspin.plan.rules.checks import check_model
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import Speculation


def unequal() -> EnginePlan:
    made = plan(attention_nodes=2, expert_nodes=2)
    first, second, *experts = made.nodes
    return replace(
        made,
        nodes=(
            replace(first, cores=(0, 1), num_threads=2, wait="spin"),
            replace(second, max_num_seqs=7, kv_cache_bytes=2**30, slow=1.5),
            *(replace(node, experts=held) for node, held in zip(experts, (6, 3), strict=True)),
        ),
        precision=(
            PrecisionRule(format="int8"),
            PrecisionRule(format="int4", part="experts", layers=tuple(range(60)), experts=(3, 0)),
        ),
    )


def several_hosts() -> EnginePlan:
    made = with_nodes(plan(expert_nodes=2, redundant_experts=8), host="10.0.0.1", key="gpu")
    *nodes, last = made.nodes
    network = NetworkSpec(control="tcp://10.0.0.1:7000", trusted=True)
    link = replace(made.link, transport="nixl")
    nodes = [*nodes, replace(last, host="10.0.0.2", optional=True)]
    return replace(made, nodes=tuple(nodes), links=(link,), network=network)


def test_processes_of_a_host_may_share_keys() -> None:
    assert several_hosts().key_groups == {"scheduler", "gateway", "gpu"}
    assert plan().key_groups == {"scheduler", "gateway", "attention", "expert"}


@pytest.mark.parametrize(
    "made",
    [
        plan(),
        plan(DENSE, path="on: #a\n'b\""),
        unequal(),
        plan(attention_device="cuda", expert_device="cuda"),
        plan(latency_us=1e-7, gbps=1e8),
        plan(speculation=Speculation(method="ngram", adaptive=False)),
        several_hosts(),
    ],
)
def test_a_printed_plan_is_read_as_the_same_and_printed_the_same(
    made: EnginePlan, tmp_path: Path
) -> None:
    text = print_plan(made)
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    assert read_plan(str(file)) == made
    assert print_plan(read_plan(str(file))) == text


def test_the_text_is_short_where_nothing_is_said() -> None:
    nodes = print_plan(unequal()).partition("nodes:\n")[2].partition("links:\n")[0]
    assert nodes.startswith(
        "- role: attention\n"
        "  index: 0\n"
        "  device: cpu\n"
        "  kernels: cpu\n"
        "  wait: spin\n"
        "  num_threads: 2\n"
        "  cores: [0, 1]\n"
        "  max_num_seqs: 64\n"
    )
    assert "num_threads" not in nodes.partition("index: 1")[2]
    assert "optional" not in nodes
    assert "gpu_memory_utilization" not in nodes
    precision = print_plan(unequal()).partition("precision:\n")[2].partition("kv_cache:\n")[0]
    assert precision.startswith(
        "- format: int8\n- format: int4\n  part: experts\n  layers: [0, 1, "
    )
    assert precision.endswith("  experts: [3, 0]\n")


def test_a_plan_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        """
        model: {path: tiny, dtype: bfloat16, max_model_len: 2048}
        nodes:
        - {role: attention, index: 0, device: cpu, kernels: cpu, wait: block, max_num_seqs: 64,
           max_num_batched_tokens: 512, kv_cache_bytes: 268435456}
        - {role: expert, index: 0, device: cpu, kernels: cpu, wait: block, experts: 8}
        links:
        - {transport: shm, payload: bf16, window_rows: 512}
        """
    )
    assert read_plan(str(file)) == plan(restart=False)
    file.write_text(dedent(file.read_text()) + "failover: {restart_deadline_s: 5}\n")
    assert not read_plan(str(file)).failover.restart


def test_the_plan_in_the_docs_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "plans.md").read_text(encoding="utf-8")
    file = tmp_path / "plan.yaml"
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    made = read_plan(str(file))
    check_model(made, FACTS._replace(num_experts=16))
    assert len({node.max_num_seqs for node in made.attention}) == 2


REFUSED = [
    ("wait: block", "wiat: block", r"unknown field `wiat` - at `\$.nodes\[0\]`"),
    ("version: 1", "version: 2", r"2 - at `\$.version`"),
    ("version: 1", "version: 1\nversion: 1", r"'version' is there twice\n.*line 2, column 1"),
    ("experts: 8", "experts: 8.0", r"Expected `int`, got `float` - at `\$.nodes\[1\].experts`"),
    ("latency_us: 0.0", "latency_us: .nan", r"`\$.links\[0\].latency_us`"),
    ("deadline_s: 30.0", "deadline_s: .inf", r"`\$.links\[0\].deadline_s`"),
    ("path: tiny", "path: 2020-13-45", r"month must be in"),
    ("index: 0", "index: 1", r"nodes: attention nodes have the indices \[1\]"),
]


@pytest.mark.parametrize(("before", "after", "reason"), REFUSED)
def test_what_is_no_plan_is_refused_by_file_and_field(
    tmp_path: Path, before: str, after: str, reason: str
) -> None:
    text = print_plan(plan())
    assert before in text
    file = tmp_path / "plan.yaml"
    file.write_text(text.replace(before, after, 1))
    with pytest.raises(ConfigError, match=f"^--plan {file}: .*{reason}"):
        read_plan(str(file))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expected `object`, got `null`"),
        (b"- 1", "Expected `object`, got `array`"),
        (b"a: b: c", "mapping values are not allowed"),
        (b"\xff", "utf-8"),
        (b"version: !!python/name:os.system x", "could not determine a constructor"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_yaml_is_refused_by_file(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "plan.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--plan {file}: .*{reason}"):
        read_plan(str(file))
