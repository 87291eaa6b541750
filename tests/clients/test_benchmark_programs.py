"""Programs that measure a server, to which no request failed, and one that scores its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoints import oracle_model
from tests.clients.conftest import Client

NUM_REQUESTS = 4
NUM_PROMPT_TOKENS = 16
NUM_TOKENS = 4
# The server computes in float32; its sums have another order than transformers'.
TOLERANCE = 1e-3
QUESTIONS = [
    {"question": "The colour of the sky is", "choices": ["blue", "seven"], "answer": 0},
    {"question": "Two and two make", "choices": ["paper", "four"], "answer": 1},
]


def test_vllm_bench_serve(model: Path, url: str, run: Client, tmp_path: Path) -> None:
    flags = {
        "--backend": "openai",
        "--base-url": url,
        "--model": "tiny",
        "--tokenizer": model,
        "--dataset-name": "random",
        "--random-input-len": NUM_PROMPT_TOKENS,
        "--random-output-len": NUM_TOKENS,
        "--num-prompts": NUM_REQUESTS,
        "--max-concurrency": 2,
        "--result-filename": "result.json",
    }
    run("vllm", "vllm", "bench", "serve", *words(flags), "--ignore-eos", "--save-result")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS
    assert result["total_input_tokens"] == NUM_REQUESTS * NUM_PROMPT_TOKENS


def test_guidellm(model: Path, url: str, run: Client, tmp_path: Path) -> None:
    data = f"kind=synthetic_text,prompt_tokens={NUM_PROMPT_TOKENS},output_tokens={NUM_TOKENS}"
    flags = {
        "--backend": f"kind=openai_http,target={url},model=tiny",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={model}",
        "--data": data,
        "--output": "kind=json,path=result.json",
    }
    run("guidellm", "guidellm", "run", *words(flags), "--disable-console")
    [result] = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    metrics = result["metrics"]
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    num_tokens = metrics["output_token_count"]["successful"]["total_sum"]
    assert num_tokens == NUM_REQUESTS * NUM_TOKENS


def test_aiperf(model: Path, url: str, run: Client, tmp_path: Path) -> None:
    flags = {
        "--model": "tiny",
        "--url": url,
        "--endpoint-type": "chat",
        "--tokenizer": model,
        "--synthetic-input-tokens-mean": NUM_PROMPT_TOKENS,
        "--output-tokens-mean": NUM_TOKENS,
        "--extra-inputs": "ignore_eos:true",
        "--request-count": NUM_REQUESTS,
        "--concurrency": 2,
        "--workers-max": 1,
        "--record-processors": 1,
        "--ui": "simple",
        "--artifact-dir": "out",
    }
    run("aiperf", "aiperf", "profile", *words(flags), "--streaming", "--no-gpu-telemetry")
    result = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == NUM_REQUESTS
    assert "error_request_count" not in result
    assert result["output_sequence_length"]["sum"] == NUM_REQUESTS * NUM_TOKENS


def test_lm_eval(model: Path, url: str, run: Client, tmp_path: Path) -> None:
    """Its log-likelihoods, by echo and logprobs, are those of transformers."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "questions.yaml").write_text(json.dumps(task))
    options = f"model=tiny,base_url={url}/v1/completions,tokenizer={model},num_concurrent=2"
    flags = {
        "--model": "local-completions",
        "--model_args": options + ",tokenizer_backend=huggingface",
        "--include_path": tmp_path,
        "--tasks": "questions",
        "--output_path": "out",
    }
    run("lm-eval", "lm_eval", "run", *words(flags), "--log_samples")
    [path] = tmp_path.glob("out/tiny/samples_questions_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["acc"] for sample in samples] == [1.0, 1.0]
    for sample, question in zip(samples, QUESTIONS, strict=True):
        found = [float(score) for [(score, _)] in sample["resps"]]
        assert found == pytest.approx(log_likelihoods(model, question), abs=TOLERANCE)


def log_likelihoods(model: Path, question: dict[str, Any]) -> list[float]:
    """Return transformers' log-likelihood of each choice after the question."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    start = len(tokenizer.encode(question["question"]).ids)
    oracle, scores = oracle_model(model), []
    for choice in question["choices"]:
        token_ids = torch.tensor([tokenizer.encode(f"{question['question']} {choice}").ids])
        with torch.no_grad():
            logprobs = oracle(input_ids=token_ids).logits[0].log_softmax(-1)
        own = logprobs[start - 1 : -1].gather(1, token_ids[0, start:, None])
        scores.append(float(own.sum()))
    return scores


def words(flags: dict[str, object]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]
