"""The flags of `topspin serve`: their list, their settings, and refused values."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import serve as serve_command
from app.cli.flags import add_arguments, read_config
from app.cli.main import main
from app.cli.serve import asked_for, serve_config, without_effect
from tests.app.cli.checkpoint import MIXTRAL, write_checkpoint
from tests.topspin.plans import with_setting
from topspin.plan.retrieval import SpillSpec
from topspin.plan.settings import EngineConfig, ModelSection
from topspin.plan.speculation import Speculation

# A new flag needs a line here. Flags are few: settings for few users belong in --plan.
FLAGS = [
    "--plan",
    "--print-plan",
    "--dtype",
    "--max-model-len",
    "--hf-overrides",
    "--quantization",
    "--attention-nodes",
    "--expert-nodes",
    "--draft-nodes",
    "--micro-batches",
    "--enable-prefix-caching",
    "--max-queued-requests",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--kv-cache-memory",
    "--kv-cache-dtype",
    "--kv-retrieval-tokens",
    "--kv-spill-dir",
    "--gpu-memory-utilization",
    "--speculative-config",
    "--transport",
    "--m2n-payload",
    "--deterministic",
    "--enforce-eager",
    "--attention-device",
    "--expert-device",
    "--num-threads",
    "--layout",
    "--redundant-experts",
    "--served-model-name",
    "--host",
    "--port",
    "--api-key-file",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--generation-config",
    "--chat-template",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "--reasoning-parser",
    "--allowed-origins",
    "--access-log",
    "--log-format",
    "--otlp-traces-endpoint",
    "--sse-keep-alive-interval",
    "--shutdown-timeout",
    "--api-key",
    "--restart",
    "--restart-deadline",
]

SETTINGS: list[tuple[str, str, Any]] = [
    ("--served-model-name a b", "gateway.served_names", ("a", "b")),
    ("--dtype float32", "model.dtype", "float32"),
    ("--max-model-len 100", "model.max_model_len", 100),
    ("--max-model-len auto", "model.max_model_len", None),
    (
        '--hf-overrides {"max_position_embeddings":512}',
        "model.hf_overrides",
        {"max_position_embeddings": 512},
    ),
    ("--hf-overrides none", "model.hf_overrides", None),
    ("--quantization int4", "model.quantization", "int4"),
    ("--attention-nodes 2", "topology.attention_nodes", 2),
    ("--expert-nodes 3", "topology.expert_nodes", 3),
    ("--draft-nodes 2", "topology.draft_nodes", 2),
    ("--max-num-seqs 5", "scheduler.max_num_seqs", 5),
    ("--max-num-batched-tokens 99", "scheduler.max_num_batched_tokens", 99),
    ("--micro-batches 3", "scheduler.micro_batches", 3),
    ("--micro-batches auto", "scheduler.micro_batches", None),
    ("--no-enable-prefix-caching", "scheduler.prefix_caching", False),
    ("--max-queued-requests 0", "scheduler.max_queued_requests", 0),
    ("--kv-cache-memory 2GiB", "cache.kv_cache_bytes", 2 * 2**30),
    ("--kv-cache-dtype fp8", "cache.kv_cache_dtype", "fp8"),
    ("--kv-retrieval-tokens 512", "cache.kv_retrieval_tokens", 512),
    (
        "--kv-spill-dir /a:b:8GiB",
        "cache.kv_spill",
        SpillSpec(directory="/a:b", size_bytes=8 * 2**30),
    ),
    ("--gpu-memory-utilization 0.5", "cache.gpu_memory_utilization", 0.5),
    ("--transport nixl", "m2n.transport", "nixl"),
    (
        '--speculative-config {"method":"ngram","prompt_lookup_max":4}',
        "speculation.config",
        Speculation(method="ngram", prompt_lookup_max=4),
    ),
    ("--speculative-config off", "speculation.config", None),
    ("--m2n-payload int8", "m2n.payload", "int8"),
    ("--attention-device cuda:1", "compute.attention_device", "cuda:1"),
    ("--expert-device cuda", "compute.expert_device", "cuda"),
    ("--enforce-eager", "compute.recordings", False),
    ("--num-threads 2", "compute.num_threads", 2),
    ("--deterministic", "compute.deterministic", True),
    ("--layout split", "compute.layout", "split"),
    ("--redundant-experts 5", "balance.redundant_experts", 5),
    ("--host 0.0.0.0", "gateway.host", "0.0.0.0"),
    ("--port 0", "gateway.port", 0),
    ("--api-key-file /keys", "gateway.api_key_file", "/keys"),
    ("--ssl-keyfile /key", "gateway.ssl_keyfile", "/key"),
    ("--ssl-certfile /cert", "gateway.ssl_certfile", "/cert"),
    ("--generation-config none", "gateway.generation_config", "none"),
    ("--chat-template /t.jinja", "gateway.chat_template", "/t.jinja"),
    ("--no-enable-auto-tool-choice", "gateway.enable_auto_tool_choice", False),
    ("--tool-call-parser hermes", "gateway.tool_call_parser", "hermes"),
    ("--reasoning-parser qwen3", "gateway.reasoning_parser", "qwen3"),
    (
        "--allowed-origins http://localhost:3000,https://ui.test",
        "gateway.allowed_origins",
        ("http://localhost:3000", "https://ui.test"),
    ),
    ('--allowed-origins ["*"]', "gateway.allowed_origins", ("*",)),
    ("--no-access-log", "gateway.access_log", False),
    ("--log-format json", "gateway.log_format", "json"),
    ("--otlp-traces-endpoint http://c/v1", "gateway.otlp_traces_endpoint", "http://c/v1"),
    ("--sse-keep-alive-interval 2.5", "gateway.sse_keep_alive_interval_s", 2.5),
    ("--shutdown-timeout 30", "gateway.shutdown_timeout_s", 30.0),
    ("--restart on", "failover.restart", True),
    ("--restart off", "failover.restart", False),
    ("--restart-deadline 7", "failover.restart_deadline_s", 7.0),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-moe")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_flags_are_these() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags = [action.option_strings[0] for action in parser._actions if action.option_strings]
    assert flags == FLAGS
    assert len(flags) <= 49
    assert {flag.split()[0].replace("--no-", "--") for flag, _, _ in SETTINGS} | {
        "--api-key"
    } == set(FLAGS[2:])


def test_a_flag_sets_its_setting_and_no_other() -> None:
    assert read_config(parse("tiny")) == EngineConfig(model=ModelSection(path="tiny"))
    for flags, key, value in SETTINGS:
        assert read_config(parse("tiny", *flags.split())) == with_setting(key, value), flags


def test_options_that_change_nothing_are_named(checkpoint: Path) -> None:
    useless = ("--gpu-memory-utilization", "0.9")
    for flags, named in (
        ((), []),
        (useless, ["--gpu-memory-utilization"]),
        (("--attention-device", "cuda", *useless), []),
    ):
        arguments = parse(str(checkpoint), "--layout", "shared", *flags)
        assert without_effect(arguments, asked_for(arguments).plan) == named


def test_the_help_shows_the_sections_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["serve", "--help"])
    assert exited.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "auto: 256.0 MiB on the CPU, what fits on a GPU (auto)",
        "address to listen on (127.0.0.1)",
        "(8000)",
        "(off)",
        "{auto,none,int8,int4,fp8}",
        "--no-enable-prefix-caching",
        "m2n: The data plane between attention and expert nodes.",
    ):
        assert words in shown


def test_a_dense_model_is_served_without_expert_nodes(tmp_path: Path) -> None:
    dense = {
        **{key: value for key, value in MIXTRAL.items() if "experts" not in key},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    path = write_checkpoint(tmp_path / "dense", dense)
    assert not asked_for(parse(str(path))).plan.experts


def test_a_model_is_named_as_users_name_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "resolve_model", lambda name: checkpoint)
    for model, name in (
        ((), "smollm2-moe"),
        (("organisation/model",), "organisation/model"),
        ((str(checkpoint),), "tiny-moe"),
    ):
        config = serve_config(asked_for(parse(*model, "--layout", "shared")))
        assert config.gateway.served_names == (name,)
        assert config.plan.model.path == str(checkpoint.resolve())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 70000", "--port 70000: must be between 0 and 65535"),
        ("--attention-device gpu", "--attention-device gpu: must be cpu, cuda or cuda:N"),
        ("--attention-device cuda --deterministic", "only the kernels for the CPU add in"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization 1.5: must be a finite number"),
        ("--expert-nodes 9", "--expert-nodes 9: the model has 8 experts per layer"),
        ("--draft-nodes 1", "--draft-nodes 1: there is no draft model to compute"),
        (
            '--draft-nodes 2 --speculative-config {"method":"draft_model","model":"self-int4"}',
            "--draft-nodes 2: 1 attention nodes ask one each",
        ),
        ("--speculative-config on", "--speculative-config: 'on': JSON is malformed"),
        (
            '--speculative-config {"method":"eagle"}',
            "Invalid enum value 'eagle' - at `$.method`; it is off or a JSON object of method",
        ),
        (
            '--speculative-config {"method":"suffix","modle":"m"}',
            "Object contains unknown field `modle`; it is off or a JSON object of method (",
        ),
        (
            '--speculative-config {"method":"suffix","model":"m"}',
            'model has no meaning for the method "suffix"',
        ),
        (
            '--speculative-config {"method":"draft_model"}',
            'the method "draft_model" needs a model: a directory or "self-int4"',
        ),
        (
            '--speculative-config {"method":"suffix+draft_model","prompt_lookup_max":3}',
            'the method "suffix+draft_model" needs a model: a directory or "self-int4"',
        ),
        (
            '--speculative-config {"method":"draft_model","model":"m","prompt_lookup_max":3}',
            'prompt_lookup_max has no meaning for the method "draft_model"',
        ),
        (
            '--speculative-config {"method":"draft_model","model":"m","draft_width":3}',
            "draft_width needs branches: a chain has one leaf",
        ),
        (
            '--speculative-config {"method":"draft_model","model":"self-int4",'
            '"quantization":"int8"}',
            "quantization int8: the model self-int4 has 4 bits",
        ),
        (
            '--speculative-config {"method":"draft_model","model":"/nowhere"}',
            "--speculative-config: the draft model /nowhere: ",
        ),
        ('--speculative-config {"num_speculative_tokens":3}', "missing required field `method`"),
        (
            '--speculative-config {"method":"suffix","num_speculative_tokens":0}',
            "Expected `int` >= 1 - at `$.num_speculative_tokens`",
        ),
        (
            '--speculative-config {"method":"ngram","prompt_lookup_min":3,"prompt_lookup_max":2}',
            "prompt_lookup_min 3 is more than prompt_lookup_max 2",
        ),
        (
            '--speculative-config {"method":"ngram","suffix_decoding_min_token_prob":0.5}',
            'suffix_decoding_min_token_prob has no meaning for the method "ngram"',
        ),
        ("--micro-batches 5", "--micro-batches 5: must be between 1 and 4"),
        ("--micro-batches many", "argument --micro-batches: 'many' is not auto or int"),
        ("--kv-cache-memory lots", "argument --kv-cache-memory: 'lots' is not a size"),
        ("--kv-cache-dtype fp4", "argument --kv-cache-dtype: invalid choice: 'fp4'"),
        (
            "--kv-cache-dtype fp8_e4m3 --attention-device cuda",
            "kv_cache.dtype (--kv-cache-dtype) fp8_e4m3: attention 0 has the kernels triton",
        ),
        ("--kv-retrieval-tokens 63", "--kv-retrieval-tokens 63: must be between 64 and 16777216"),
        (
            "--kv-retrieval-tokens 512 --deterministic",
            "kv_cache.retrieval (--kv-retrieval-tokens): attention 0 has the kernels deterministic",
        ),
        ("--kv-spill-dir /tmp", "argument --kv-spill-dir: '/tmp' is not DIR:SIZE"),
        ("--kv-spill-dir /tmp:much", "argument --kv-spill-dir: 'much' is not a size"),
        (
            "--kv-spill-dir /tmp:1GiB",
            "kv_cache.spill (--kv-spill-dir): without kv_cache.retrieval (--kv-retrieval-tokens)",
        ),
        (
            "--kv-spill-dir host:1GiB --kv-retrieval-tokens 512",
            "kv_cache.spill (--kv-spill-dir): attention 0 has the kernels cpu; only triton reads",
        ),
        (
            "--kv-spill-dir /tmp:1GiB --kv-retrieval-tokens 512 "
            '--speculative-config {"method":"draft_model","model":"self-int4","branches":true}',
            "kv_cache.spill (--kv-spill-dir): drafts that branch attend to all keys",
        ),
        ("--log-format xml", "argument --log-format: invalid choice: 'xml'"),
        ("--shutdown-timeout -1", "--shutdown-timeout -1: must be between 0 and 3600"),
        ("--restart maybe", "argument --restart: 'maybe' is neither on nor off"),
        (
            "--max-model-len 257",
            "--max-model-len 257: the model has positions up to 256, which --hf-overrides can",
        ),
        (
            '--hf-overrides {"max_position_embeddings":512} --max-model-len 513',
            "--max-model-len 513: the model has positions up to 512, which --hf-overrides can",
        ),
        (
            '--hf-overrides {"num_attention_heads":2}',
            "--hf-overrides (model.hf_overrides): num_attention_heads: only max_position_embedd",
        ),
        ("--hf-overrides yarn", "argument --hf-overrides: 'yarn': JSON is malformed"),
        ("--hf-overrides [1]", "argument --hf-overrides: '[1]': Expected `object`, got `array`"),
        ("--dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--expert-nodes big", "argument --expert-nodes: 'big' is not int"),
        ("--generation-config /nowhere", "there is no /nowhere/generation_config.json"),
        ("--config f.json", "unrecognized arguments: --config f.json"),
        ("--kernels cpu", "unrecognized arguments: --kernels cpu"),
        ("--max-num 3", "unrecognized arguments: --max-num 3"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_is_started(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    try:
        status = main(["serve", str(checkpoint), *flags.split()])
    except SystemExit as exited:  # how argparse ends
        status = int(exited.code or 0)
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(("topspin serve: error: ", "topspin: error: "))
    assert message in last


def test_a_draft_model_of_another_vocabulary_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve_command, "launch", lambda config: pytest.fail("was launched"))
    draft = write_checkpoint(tmp_path / "draft", {**MIXTRAL, "vocab_size": 300})
    flag = json.dumps({"method": "draft_model", "model": str(draft)})
    assert main(["serve", str(checkpoint), "--speculative-config", flag]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"the draft model {draft} has a vocabulary of 300 tokens, " in last
    assert "one of 260: they must have the same tokens" in last


def test_processes_get_the_draft_models_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_checkpoint(tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    for name, path in (("./draft", str(draft)), ("self-int4", "self-int4")):
        flag = json.dumps({"method": "draft_model", "model": name})
        for device in ("cpu", "cuda"):
            flags = ("--layout", "shared", "--attention-device", device)
            asked = asked_for(parse(str(checkpoint), *flags, "--speculative-config", flag))
            speculation = serve_config(asked).plan.speculation
            assert speculation is not None
            assert speculation.model == path
