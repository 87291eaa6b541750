"""The Grafana dashboard of an engine.

Owns what is shown together, in which order and unit. A panel is described by its metrics' own
texts. Pure: returns the tree of Grafana's JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from deploy.observability.catalogue import PREFIX, Catalogue, Family, Query, read_families
from server.gateway.operations.metrics import MODEL_LABEL

VARIABLES: Final = ("namespace", "job", "instance", MODEL_LABEL)
"""The labels by which the user chooses what is shown; none but the last need be there."""
NOT_SHOWN: Final = {
    "request_inference_time_seconds": "prefill and decode, which are shown, together",
}
"""Metrics without a panel, and why."""

COLUMNS: Final = 24
PANEL_WIDTH: Final = 8
PANEL_HEIGHT: Final = 8
QUANTILES: Final = (0.5, 0.95, 0.99)
# The last version of the JSON that Grafana 11 writes; later ones read it.
SCHEMA_VERSION: Final = 39

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Which engine a line is of.
_ENGINE: Final = f"{{{{job}}}} {{{{{MODEL_LABEL}}}}}"

Object = dict[str, Any]


class Line(NamedTuple):
    """A query, and what its lines are called beside their engine."""

    query: Query
    legend: str


class Panel(NamedTuple):
    """One diagram. `unit` is Grafana's name; `is_share`: the axis ends at 1."""

    title: str
    unit: str
    lines: Sequence[Line]
    stacked: bool = False
    is_share: bool = False


def dashboard() -> Object:
    """Return the dashboard, as Grafana imports it."""
    families = read_families()
    catalogue = Catalogue(families, selector=_chosen(VARIABLES), window="$__rate_interval")
    return {
        "uid": "topspin",
        "title": "Topspin",
        "tags": ["topspin"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        # Panels share their crosshair.
        "graphTooltip": 1,
        "templating": {
            "list": [
                _data_source(),
                *(_variable(families, index) for index in range(len(VARIABLES))),
            ]
        },
        "panels": list(_placed(_rows(catalogue))),
    }


def _chosen(labels: Sequence[str]) -> str:
    """Return PromQL's matchers of what the user chose."""
    return ",".join(f'{label}=~"${label}"' for label in labels)


def _rows(catalogue: Catalogue) -> Iterator[tuple[str, list[Panel]]]:
    yield "Requests and latency", _requests(catalogue)
    yield "Engine", _engine(catalogue)
    yield "Experts", _experts(catalogue)
    yield "Link, micro-batches, local layers", _links(catalogue)
    yield "Speculation", _speculation(catalogue)
    yield "Retrieval and spill", _retrieval(catalogue)
    yield "Nodes", _nodes(catalogue)


def _requests(of: Catalogue) -> list[Panel]:
    responses = of.rate("http_responses", "endpoint", "code")
    ends = of.rate("request_success", "finished_reason")
    return [
        Panel("Answers by status", "reqps", [Line(responses, "{{code}} {{endpoint}}")]),
        Panel("Choices ended, by reason", "reqps", [Line(ends, "{{finished_reason}}")]),
        Panel(
            "Tokens",
            "short",
            [
                Line(of.rate("prompt_tokens"), "prompt tokens/s"),
                Line(of.rate("generation_tokens"), "output tokens/s"),
            ],
        ),
        _quantiles(of, "Time to first token", "time_to_first_token_seconds"),
        _quantiles(of, "Inter-token latency", "inter_token_latency_seconds"),
        _quantiles(of, "Time per output token", "request_time_per_output_token_seconds"),
        _quantiles(of, "End-to-end latency", "e2e_request_latency_seconds"),
        _quantiles(of, "Time in the queue", "request_queue_time_seconds"),
        _quantiles(of, "Prefill", "request_prefill_time_seconds"),
        _quantiles(of, "Decode", "request_decode_time_seconds"),
        _quantiles(of, "Prompt length", "request_prompt_tokens", unit="short"),
        _quantiles(of, "Output length", "request_generation_tokens", unit="short"),
        Panel(
            "What requests ask for",
            "short",
            [
                Line(of.mean("request_params_max_tokens"), "mean max_tokens"),
                Line(of.mean("request_params_n"), "mean n"),
            ],
        ),
    ]


def _engine(of: Catalogue) -> list[Panel]:
    hits, queries = of.rate("prefix_cache_hits"), of.rate("prefix_cache_queries")
    own = ("prepare", "draft", "attention", "wait", "sample")
    return [
        Panel("The scheduler answers", "short", [Line(of.each("engine_up"), "{{instance}}")]),
        Panel(
            "Requests",
            "short",
            [
                Line(of.value("num_requests_running"), "running"),
                Line(of.value("num_requests_waiting"), "waiting"),
                Line(of.value("max_queued_requests"), "may wait"),
            ],
        ),
        Panel(
            "KV blocks in use",
            "percentunit",
            [
                Line(of.value("kv_cache_usage_perc"), "all"),
                Line(of.value("kv_spill_memory_usage_perc"), "in memory, beside a spill"),
            ],
            is_share=True,
        ),
        Panel(
            "Preemptions and replays",
            "reqps",
            [
                Line(of.rate("num_preemptions"), "preempted"),
                Line(of.rate("num_replays"), "replayed"),
            ],
        ),
        Panel(
            "Prompt tokens found cached", "percentunit", [Line(hits / queries, "")], is_share=True
        ),
        Panel("Steps per second", "ops", [Line(of.rate("engine_steps"), "")]),
        Panel(
            "Step",
            "s",
            [Line(of.rate("engine_step_seconds") / of.rate("engine_steps"), "mean")],
        ),
        Panel(
            "Where attention nodes' time goes (seconds per second, of all nodes)",
            "short",
            [
                *(Line(of.spent(f"step_{phase}_seconds"), phase) for phase in own),
                Line(of.spent("scheduler_gap_seconds"), "no plan yet"),
            ],
            stacked=True,
        ),
        _quantiles(of, "Tokens per step", "iteration_tokens_total", unit="short"),
        Panel(
            "Grammars",
            "ops",
            [
                Line(of.rate("grammars_compiled"), "compiled"),
                Line(of.rate("grammars_found"), "found compiled"),
            ],
        ),
    ]


def _experts(of: Catalogue) -> list[Panel]:
    activations, batches = of.rate("expert_activations"), of.rate("expert_batches")
    tokens = of.rate("expert_tokens")
    hot = of.value("expert_tokens_top", "layer", "expert")
    return [
        Panel(
            "Balance of expert nodes, max/mean",
            "short",
            [Line(of.value("expert_balance", "table"), "{{table}} table")],
        ),
        Panel(
            "Routed pairs of the busiest experts, since the start",
            "short",
            [Line(hot, "layer {{layer}} expert {{expert}}")],
        ),
        Panel("Routed pairs per second", "ops", [Line(tokens, "")]),
        Panel("Experts active per batch", "short", [Line(activations / batches, "")]),
        Panel("Pairs per active expert", "short", [Line(tokens / activations, "")]),
        _quantiles(of, "Busiest expert node's computing, per step", "step_expert_seconds"),
        Panel("Expert table's version", "short", [Line(of.value("expert_table_version"), "")]),
        Panel("Experts read for new tables", "ops", [Line(of.rate("expert_migrations"), "")]),
    ]


def _links(of: Catalogue) -> list[Panel]:
    return [
        _quantiles(of, "Link, one way", "step_link_seconds"),
        _quantiles(of, "Waiting for experts, per step", "step_wait_seconds"),
        Panel("Micro-batches", "short", [Line(of.value("micro_batches"), "")]),
        Panel("MoE layers without a hop", "short", [Line(of.value("local_layers"), "")]),
    ]


def _speculation(of: Catalogue) -> list[Panel]:
    drafts, tokens = of.rate("spec_decode_num_drafts"), of.rate("spec_decode_num_draft_tokens")
    accepted = of.rate("spec_decode_num_accepted_tokens")
    by_place = of.rate("spec_decode_num_accepted_tokens_per_pos", "position")
    passes = of.rate("spec_decode_draft_passes")
    overlapped = of.rate("spec_decode_overlapped_draft_passes")
    return [
        Panel("Draft tokens accepted", "percentunit", [Line(accepted / tokens, "")], is_share=True),
        Panel("Tokens accepted per draft", "short", [Line(accepted / drafts, "")]),
        Panel("Accepted, by place in the draft", "ops", [Line(by_place, "{{position}}")]),
        Panel(
            "Trees of draft nodes",
            "ops",
            [
                Line(of.rate("spec_decode_root_hits"), "had the verified token"),
                Line(of.rate("spec_decode_root_misses"), "ended by it"),
            ],
        ),
        Panel(
            "Draft nodes' passes",
            "ops",
            [Line(passes, "all"), Line(overlapped, "for which nobody waited")],
        ),
        Panel(
            "Draft node's pass",
            "s",
            [Line(of.rate("spec_decode_draft_pass_seconds") / passes, "mean")],
        ),
    ]


def _retrieval(of: Catalogue) -> list[Panel]:
    recall = of.mean("kv_retrieval_recall")
    return [
        Panel("Recall of the selection", "percentunit", [Line(recall, "mean")], is_share=True),
        Panel(
            "Retrieval",
            "ops",
            [
                Line(of.rate("kv_retrieval_selected_rows"), "rows with a selection"),
                Line(of.rate("kv_retrieval_coded_segments"), "segments coded"),
            ],
        ),
        Panel(
            "Spill: blocks",
            "ops",
            [
                Line(of.rate("kv_spill_saved_blocks"), "written"),
                Line(of.rate("kv_spill_loaded_blocks"), "read whole"),
            ],
        ),
        Panel(
            "Spill: selected keys",
            "ops",
            [
                Line(of.rate("kv_spill_hot_keys"), "in memory"),
                Line(of.rate("kv_spill_read_keys"), "read from the file"),
            ],
        ),
    ]


def _nodes(of: Catalogue) -> list[Panel]:
    by = ("role", "optional")
    return [
        Panel(
            "Nodes there, and planned",
            "short",
            [
                Line(of.value("nodes", *by), "{{role}}, optional: {{optional}}"),
                Line(of.value("nodes_planned", *by), "{{role}} planned, optional: {{optional}}"),
            ],
        ),
    ]


def _quantiles(of: Catalogue, title: str, name: str, *, unit: str = "s") -> Panel:
    lines = [Line(of.quantile(share, name), f"p{100 * share:g}") for share in QUANTILES]
    return Panel(title, unit, lines)


def _placed(rows: Iterator[tuple[str, list[Panel]]]) -> Iterator[Object]:
    """Yield the rows' headings and panels, from the top left to the bottom right."""
    number, y = 0, 0
    for title, panels in rows:
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        y += 1
        for start in range(0, len(panels), COLUMNS // PANEL_WIDTH):
            for column, panel in enumerate(panels[start : start + COLUMNS // PANEL_WIDTH]):
                number += 1
                yield _panel(panel, number, x=column * PANEL_WIDTH, y=y)
            y += PANEL_HEIGHT


def _panel(panel: Panel, number: int, *, x: int, y: int) -> Object:
    families = {family.name: family for line in panel.lines for family in line.query.families}
    custom: Object = {"fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(
            f"`{PREFIX}{family.name}`: {family.text}" for family in families.values()
        ),
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                **({"max": 1} if panel.is_share else {}),
                "custom": custom,
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "editorMode": "code",
                "expr": line.query.text,
                "legendFormat": f"{line.legend} {_ENGINE}".strip(),
                "range": True,
            }
            for index, line in enumerate(panel.lines)
        ],
    }


def _data_source() -> Object:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "refresh": 1,
    }


def _variable(families: Mapping[str, Family], index: int) -> Object:
    """Return the choice of one label's values, among those of the labels before it."""
    label = VARIABLES[index]
    engines = Catalogue(families, selector=_chosen(VARIABLES[:index]), window="")
    text = f"label_values({engines.each('engine_up').text}, {label})"
    return {
        "name": label,
        "label": label.replace("_", " "),
        "type": "query",
        "datasource": _SOURCE,
        "definition": text,
        "query": {"query": text, "refId": f"Variable-{label}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also what has no such label.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }
