"""The policies of an engine plan, and the settings of its HTTP side.

Owns their fields, with the help and the flag of those that have one (topspin.plan.flags has the
flags that write no field). Knows no nodes, no tensors and no sockets. Part of topspin.plan.spec.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from topspin.cores import SPIN_COUNT
from topspin.logs import FORMAT_VARIABLE, LogFormat
from topspin.plan.setting import AUTO, Setting
from topspin.units import parse_object, parse_origins, parse_root_path, parse_switch

API_KEY_VARIABLE = "TOPSPIN_API_KEY"
"""The variable with the one API key of a server, and of the commands that are its clients."""

MAX_LOGPROBS = 20
"""Log-probabilities of other tokens that a request may have beside each."""

WINDOW_ROWS = 512
GPU_WINDOW_ROWS = 2048
MAX_MICRO_BATCHES = 4
# A plan travels as JSON, which has no infinity.
FINITE = 10**9

Transport = Literal["local", "shm", "tcp", "nixl", "cuda_ipc"]
Dtype = Literal["float32", "bfloat16"]
Standby = Literal["none", "imports", "weights"]
KvDtype = Literal["auto", "fp8", "fp8_e4m3"]
Payload = Literal["bf16", "fp32", "fp8", "int8"]
TaggedCallParser = Literal["glm45", "glm47", "minimax_m2", "qwen3_coder"]
NamedCallParser = Literal["mistral", "deepseek_v3", "deepseek_v31", "kimi_k2"]
ThoughtParser = Literal["deepseek_r1", "deepseek_v3", "kimi_k2", "qwen3", "glm45", "minimax_m2"]

Count = Annotated[int, Meta(ge=1, le=2**20)]
Natural = Annotated[int, Meta(ge=0, le=2**20)]
Amount = Annotated[float, Meta(ge=0, le=FINITE)]
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
Timeout = Annotated[float, Meta(ge=0, le=3600)]


class BatchLimits(NamedTuple):
    """The maximum of running sequences and of tokens per step, per attention node."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_BATCH = BatchLimits(64, 512)
# A few hundred rows leave a GPU far below its arithmetic limit; prompts should fill it.
GPU_BATCH = BatchLimits(256, 8192)
# People wait so long for a chat to begin; what waits longer says so, or is told to come again.
DEFAULT_MAX_TTFT_S = 10.0
# Or so many times as long as their prompt alone takes.
DEFAULT_MAX_SLOWDOWN = 3.0
CPU_KV_CACHE_BYTES = 256 * 2**20


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings that one part of the system reads."""


class SchedulingPolicy(Section, frozen=True, kw_only=True):
    """How steps are planned, and how many requests may wait.

    `micro_batches` None: measured while serving. A request that lost its cache blocks
    `max_preemptions` times is admitted again only where it cannot lose them once more.
    `max_ttft_s` None: DEFAULT_MAX_TTFT_S for requests that do not say how long they wait.
    """

    micro_batches: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_MICRO_BATCHES)] | None,
        Setting(
            "micro-batches in flight; auto: measured while serving",
            flag="--micro-batches M",
            unset=AUTO,
        ),
    ] = None
    prefix_caching: Annotated[
        bool, Setting("reuse cached prompt prefixes", flag="--enable-prefix-caching")
    ] = True
    max_num_queued_reqs: Annotated[
        Natural,
        Setting(
            "waiting choices of requests beyond which new ones get 429",
            flag="--max-num-queued-reqs N",
        ),
    ] = 1024
    max_num_queued_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**31)],
        Setting(
            "prompt tokens of waiting requests beyond which new ones get 429",
            flag="--max-num-queued-tokens N",
        ),
    ] = 2**22
    max_ttft_s: Annotated[
        Timeout | None,
        Setting(
            "requests whose first token would come later get 429 at once; 0: none do; auto: 10, or "
            "what the request says in x-request-timeout",
            flag="--max-ttft SECONDS",
            unset=AUTO,
        ),
    ] = None
    max_preemptions: Natural = 4

    def first_token_bound_s(self, timeout_s: float | None, prompt_s: float = 0.0) -> float:
        """Return how long a request, whose client waits `timeout_s`, may be without a token.

        Its prompt alone takes `prompt_s`: who asks much expects to wait.
        """
        operators_s = math.inf if self.max_ttft_s == 0 else self.max_ttft_s
        given = [bound for bound in (operators_s, timeout_s) if bound is not None]
        return min(given, default=max(DEFAULT_MAX_TTFT_S, DEFAULT_MAX_SLOWDOWN * prompt_s))


class ExecutionPolicy(Section, frozen=True, kw_only=True):
    """How all nodes compute.

    `deterministic`: a request's logits have the same bits on any layout, in any batch, after any
    replay, with the kernels of that name. A node's decode step is recorded once per size and
    replayed with `recordings`: a CUDA graph on a GPU, a program of compiled calls on a CPU. An idle
    OpenMP thread looks for work `spin_count` times before it sleeps.
    """

    deterministic: Annotated[
        bool,
        Setting(
            "the same bits of logits on any layout and in any batch; slower", flag="--deterministic"
        ),
    ] = False
    recordings: Annotated[
        bool,
        Setting(
            "launch every kernel by itself instead of replaying recorded steps",
            flag="--enforce-eager",
            constant=False,
        ),
    ] = True
    spin_count: Annotated[int, Meta(ge=0, le=2**31 - 1)] = SPIN_COUNT


class BalancePolicy(Section, frozen=True, kw_only=True):
    """When the placement of routed experts on nodes changes.

    Several expert nodes' share of the experts is planned every `interval_s` (0: never). A new plan
    must lower max/mean of the nodes' load by `min_gain` (0.05: 5 %). Averaged loads have a
    half-life of `half_life_pairs` routed pairs per layer and expert.
    """

    interval_s: Amount = 60.0
    min_gain: Amount = 0.05
    half_life_pairs: Annotated[int, Meta(ge=1, le=2**30)] = 512


class TraceSection(Section, frozen=True, kw_only=True):
    """The flight recorder of every node, which `topspin trace` reads; a stamp has 24 bytes."""

    enabled: bool = True
    num_stamps: Annotated[int, Meta(ge=1, le=2**21)] = 2**17


class FailoverPolicy(Section, frozen=True, kw_only=True):
    """The reaction to the loss of a node; with flags an engine restarts nodes by default.

    A node that takes longer than `halt_deadline_s` to give up a failed step is dead, and one that
    got SIGTERM ends at the latest then. A connected node that is silent for `progress_deadline_s`
    while a step waits for it is dead: that bounds one layer, and holds without restarts too.
    `standby`: what `topspin serve` keeps for the nodes that it has to start again. "imports":
    processes that have imported their modules, which it forks; "weights": beside these a second
    process of each attention and expert node, which has loaded and takes its place.
    """

    restart: Annotated[
        bool,
        Setting(
            "when a node is lost: restart it and replay its requests, or end the engine",
            flag="--restart on|off",
            parse=parse_switch,
            unset="on",
        ),
    ] = False
    restart_deadline_s: Annotated[
        Positive,
        Setting(
            "how long requests wait for a lost node or scheduler before they get 503",
            flag="--restart-deadline SECONDS",
        ),
    ] = 30.0
    halt_deadline_s: Positive = 10.0
    standby: Standby = "imports"
    # Nodes report twice a second (topspin.processes.progress.INTERVAL_S).
    progress_deadline_s: Annotated[float, Meta(ge=2, le=FINITE)] = 20.0


class GatewaySection(Section, frozen=True, kw_only=True):
    """The HTTP side.

    `generation_config`: the source of the defaults of sampling parameters: "auto" is the
    checkpoint's generation_config.json, "none" is OpenAI's, else a directory with that file.
    `allowed_origins`: the origins of web pages that may call the server from a browser; `*` is any.
    `log_format` is that of all processes.
    """

    served_names: Annotated[
        tuple[str, ...],
        Setting(
            "names by which clients ask for the model; the first one is shown; none: MODEL",
            flag="--served-model-name NAME",
        ),
    ] = ()
    host: Annotated[str, Setting("address to listen on", flag="--host")] = "127.0.0.1"
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        Setting("TCP port; 0 takes a free one", flag="--port"),
    ] = 8000
    api_key_file: Annotated[
        str | None,
        Setting(
            "file with the API keys that requests must bring one of, TENANT: KEY a line, read "
            "again when it changes; for a single key set $TOPSPIN_API_KEY or --api-key; none",
            flag="--api-key-file FILE",
            unset="none",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Setting("PEM file with the key of --ssl-certfile", flag="--ssl-keyfile FILE", unset="none"),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Setting(
            "PEM file with the certificates of this server, which then speaks TLS; none",
            flag="--ssl-certfile FILE",
            unset="none",
        ),
    ] = None
    generation_config: Annotated[
        str,
        Setting(
            "whose generation_config.json gives the defaults of sampling parameters: auto: the "
            "checkpoint's, none: nobody's, else that of a directory",
            flag="--generation-config auto|none|DIR",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None,
        Setting(
            "defaults of sampling parameters in place of those of --generation-config, as JSON",
            flag="--override-generation-config JSON",
            parse=parse_object,
            unset="none",
        ),
    ] = None
    max_logprobs: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)],
        Setting(
            f"log-probabilities that a request may ask for beside each token, at most "
            f"{MAX_LOGPROBS}; -1: and of short prompts those of the whole vocabulary",
            flag="--max-logprobs N",
        ),
    ] = MAX_LOGPROBS
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        Setting(
            "what becomes of a request with fields that no API here has: it is refused with the "
            "field's name, or they are ignored and named in the header x-topspin-ignored",
            flag="--unknown-fields",
        ),
    ] = "refuse"
    root_path: Annotated[
        str,
        Setting(
            "the path below which a proxy shows this server, as /llm; requests may come with it "
            "or without",
            flag="--root-path PATH",
            parse=parse_root_path,
        ),
    ] = ""
    chat_template: Annotated[
        str | None,
        Setting(
            "a Jinja file in place of the checkpoint's chat template",
            flag="--chat-template FILE",
            unset=AUTO,
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool,
        Setting(
            "whether the model may decide to call a tool that a request offers",
            flag="--enable-auto-tool-choice",
        ),
    ] = True
    tool_call_parser: Annotated[
        Literal[
            "auto", "none", "hermes", "llama3_json", "openai", NamedCallParser, TaggedCallParser
        ],
        Setting(
            "the format in which the model calls tools; auto: that of its chat template",
            flag="--tool-call-parser",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", ThoughtParser, "openai_gptoss"],
        Setting(
            "the format in which the model marks its reasoning (openai_gptoss: channels, other "
            "names: <think>); auto: that of its chat template",
            flag="--reasoning-parser",
        ),
    ] = "auto"
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting(
            "web pages that browsers let call the server (CORS), as JSON or with commas: "
            "http://localhost:3000,https://ui.example.com, or * for all; none",
            flag="--allowed-origins LIST",
            parse=parse_origins,
        ),
    ] = ()
    access_log: Annotated[
        bool,
        Setting("log each request at its end, but for /health and /metrics", flag="--access-log"),
    ] = True
    log_format: Annotated[
        LogFormat | None,
        Setting(
            "the logs of all processes: a line of text, or a JSON object, per record; auto: "
            f"${FORMAT_VARIABLE}, or text",
            flag="--log-format",
            unset=AUTO,
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Setting(
            "OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP: "
            "http://localhost:4318/v1/traces; OTEL_... variables hold; none",
            flag="--otlp-traces-endpoint URL",
            unset="none",
        ),
    ] = None
    sse_keep_alive_interval_s: Annotated[
        Timeout,
        Setting(
            "a stream that has sent nothing for so long sends a comment, so that clients and "
            "proxies wait on; 0: none",
            flag="--sse-keep-alive-interval SECONDS",
        ),
    ] = 15.0
    request_timeout_s: Annotated[
        Timeout,
        Setting(
            "a request ends after so long, unless its x-request-timeout says less; 0: never",
            flag="--request-timeout SECONDS",
        ),
    ] = 0.0
    shutdown_timeout_s: Annotated[
        Timeout,
        Setting(
            "at SIGTERM requests in flight get this long to end; new ones are refused",
            flag="--shutdown-timeout SECONDS",
        ),
    ] = 1.0
