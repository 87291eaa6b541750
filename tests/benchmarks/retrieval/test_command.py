"""topspin bench retrieval: what is read from a model, its questions, its flags, and small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from app.cli.main import main
from benchmarks.experiment import can_draw
from benchmarks.local_model import BLOCK_SIZE, LocalModel
from benchmarks.retrieval import command, quality, speed, tasks
from benchmarks.retrieval.flags import NothingSelected, RetrievalFlags
from benchmarks.retrieval.tasks import KINDS, questions_of
from kernels.contracts import SEGMENT_KEYS
from kernels.cpu.compiled.matmul.linear import block_width
from models.text.tokenizer import Tokenizer
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_model
from topspin.errors import ConfigError

TEXT = "".join(f"Line {number} says nothing that matters.\n" for number in range(400))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # A byte of text is a token here.
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 8192}
    return make_checkpoint(folder, "mixtral", **sizes)


def some_tokens(count: int) -> list[int]:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB_SIZE - 8, (count,), generator=rng).tolist()


@pytest.mark.slow
@torch.inference_mode()
def test_queries_and_keys_are_those_of_transformers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, wanted = some_tokens(150), [3, 40, 149, 150, 152]
    model = LocalModel(checkpoint, num_blocks=10)
    found = quality.capture(model, tokens, wanted, num_generated=3)
    assert found.positions == wanted
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    eager = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **settings: Any) -> Any:
        seen.append((query[0], key[0], value[0]))
        return eager(module, query, key, value, *rest, **settings)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "watched", attend)
    oracle = oracle_model(checkpoint)
    oracle.set_attn_implementation("watched")
    oracle(torch.tensor([tokens]))
    assert len(seen) == len(found.keys) == 2
    for layer, (queries, keys, values) in enumerate(seen):
        for ours, theirs in (
            (found.queries[layer][:3], queries[:, wanted[:3]].transpose(0, 1)),
            (found.keys[layer][:, :150], keys),
            (found.values[layer][:, :150], values),
        ):
            # The model here computes in bf16.
            assert ours.shape == theirs.shape
            assert (ours - theirs).norm() < 0.02 * theirs.norm()
        assert found.keys[layer].shape[1] == 153
        assert len(found.queries[layer]) == len(wanted)


def test_exact_is_best_in_recall_and_all_keys_have_no_error() -> None:
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 400, 16, generator=rng)
    query = torch.randn(4, 16, generator=rng)
    asked = quality.LayerQuery(query, keys, values)
    exact = quality.methods.exact_scores(query, keys[:, :399])
    scores = {quality.EXACT: exact, "worst": -exact}
    policy = quality.RetrievalPolicy(num_tokens=100, num_sinks=4, num_recent=20)
    found = quality.compare(asked, scores, policy)
    assert found["exact"][1] == 1.0
    assert found["worst"][1] == 0.0
    assert 0 < found["exact"][0] < found["worst"][0]
    policy = quality.RetrievalPolicy(num_tokens=399, num_sinks=4, num_recent=20)
    assert all(
        error < 1e-6 and recall == 1.0
        for error, recall in quality.compare(asked, scores, policy).values()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_is_answered_once_in_its_text(kind: str, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_directory(checkpoint)

    def made(seed: int) -> list[tasks.Question]:
        return questions_of(kind, TEXT, tokenizer=tokenizer, num_tokens=3000, count=5, seed=seed)

    questions = made(1)
    assert questions == made(1)
    assert questions != made(2)
    assert len({question.number for question in questions}) == 5
    documents = {question.prompt.partition("Question:")[0] for question in questions}
    assert len(documents) == 1
    example = questions[0].prompt.rpartition(".\nQuestion")[0].rpartition(" = ")[2]
    places = []
    for question in questions:
        name = question.prompt.rpartition("Question: ")[2].partition("?")[0]
        fact = f"{name} = {question.number}."
        times = 2 if kind == "needles" else 1
        assert question.prompt.count(question.number) == question.prompt.count(fact) == times
        assert question.prompt.endswith(f" = {example}.\nQuestion: {name}?\nAnswer:")
        places.append(question.prompt.index(fact))
        length = len(tokenizer.encode(question.prompt, add_special_tokens=False))
        assert 2500 < length < 3000
    assert max(places) - min(places) > (1200 if kind == "needles" else 100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; it must be above 0"),
        (["--positions", "1"], "--positions is 1"),
        (["--questions", "99"], "--questions 99: a text has facts for 56"),
        (["--parts", "speed,luck"], "--parts: luck; there are"),
        (["--contexts", "1000"], r"--contexts 1000: must be 1089 or more"),
        (["--contexts", "2047"], "whole blocks of 16"),
        (["--budgets", "10"], "--budgets 10: at least 64"),
        (["--text", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--kv-retrieval-tokens=5"], "--kv-retrieval-tokens=5: the benchmark sets it itself"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(
    flags: list[str], message: str, checkpoint: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        command.main([str(checkpoint), *flags])


def test_a_text_that_is_too_short_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("short")
    with pytest.raises(ConfigError, match="the text has 5 tokens, fewer than 8192"):
        command.main([str(checkpoint), "--text", str(file)])


def test_keys_that_are_latents_are_refused(tmp_path: Path) -> None:
    """So does a server with --kv-retrieval-tokens."""
    with pytest.raises(ConfigError, match="latents, which are the keys of all heads"):
        command.main([str(make_checkpoint(tmp_path, "deepseek_v2_lite"))])


def test_steps_in_which_nothing_is_selected_are_no_result(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = LocalModel.node
    monkeypatch.setattr(LocalModel, "node", lambda self, tokens=None: node(self, None))
    flags = ("--tokens", str(SEGMENT_KEYS), "--contexts", str(2 * SEGMENT_KEYS), "--budgets", "128")
    parser = command.EXPERIMENT.parser(rounds=1)
    asked = RetrievalFlags.read(parser, [str(checkpoint), *flags, "--steps", "2", "--quiet"])
    with pytest.raises(NothingSelected, match="no codebook was learnt with 128 tokens"):
        speed.measure(asked)


@pytest.mark.slow
@pytest.mark.skipif(not block_width(), reason="this processor leaves bf16 products to oneDNN")
def test_a_whole_run_on_a_tiny_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *(str(checkpoint), "--result-dir", str(tmp_path), "--quiet", "--tokens", "4096"),
        *("--positions", "4", "--texts", "1", "--questions", "2", "--steps", "3", "--rounds", "1"),
        *("--contexts", "2048,5120", "--budgets", "128,256"),
        *("--kv-cache-memory", "32MiB", "--layout", "shared"),
    ]
    assert main(["bench", "retrieval", *flags]) == 0
    result = json.loads((tmp_path / "retrieval.json").read_text())
    for budget in result["quality"]["text"]["budgets"].values():
        figures = budget["methods"]
        assert figures["exact"]["recall"] == 1.0
        assert figures["random"]["recall"] < figures["PQ, segments"]["recall"] < 1
    assert len(result["quality"]["generation"]["errors"]["PQ, one codebook"]) == 4
    for kind in KINDS:
        assert result["tasks"][kind]["asked"] == 2
        assert set(result["tasks"][kind]["found"]) == {"dense", "1/5", "1/10"}
    assert [row["context"] for row in result["speed"]["rows"]] == [2048, 5120]
    for row in result["speed"]["rows"]:
        assert list(row["servers"]) == ["dense", "128", "256"]
        for name, figures in row["servers"].items():
            ops = {"attend"} if name == "dense" else {"attend", "search", "attend_lists"}
            assert set(figures["attention_ops_us"]) == ops
            assert figures["step_ms"] > 0
    assert result["speed"]["prompts"]["tokens"] % BLOCK_SIZE == 0
    assert "facts found" in capsys.readouterr().out
    assert "| 5120 |" in command.EXPERIMENT.markdown(result)
    assert (tmp_path / "retrieval.png").exists() == can_draw()
