"""Drafts of a checkpoint's own head against transformers' head, from transformers' rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention_nodes.loading import load_runner
from attention_nodes.step.drafts import FinalRows
from draft_nodes.drafter import make_drafter
from draft_nodes.mtp import MtpDrafter
from kernels.cpu.compiled.matmul.linear import block_width
from spec_decode.draft import Draft, DraftRequest, DraftText
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine import engine_config
from tests.mtp_heads import add_head, drafted_by, final_rows_of, head_oracle
from tests.pairwise import few
from tests.structs import changed
from topspin.errors import CheckpointError, ConfigError
from topspin.plan.speculation import Speculation

MTP = Speculation(method="mtp", num_speculative_tokens=3, adaptive=False)
VARIANTS = ("deepseek_v3", "glm4_moe")


class Heads:
    """A drafter beside its target, and transformers' model and head of the same checkpoint."""

    def __init__(self, path: Path, **settings: Any) -> None:
        config = engine_config(path, speculation=MTP, **settings).for_node()
        drafter = make_drafter(config, path)
        assert isinstance(drafter, MtpDrafter)
        self.drafter = drafter
        load_runner(path, config, drafter=drafter)
        self.model, self.head = head_oracle(path)

    def take(self, seq_id: int, tokens: list[int], begin: int, end: int) -> None:
        """Let the drafter have the rows of tokens `begin` to `end`."""
        rows = final_rows_of(self.model, tokens)[begin:end]
        self.drafter.take([FinalRows(text_of(seq_id, tokens), begin, rows)])

    def draft(self, texts: dict[int, list[int]], at_most: int = 3) -> list[Draft]:
        asked = [DraftRequest(text_of(*each), at_most) for each in texts.items()]
        return self.drafter.draft(asked)

    def expected(self, tokens: list[int], *, start: int = 0) -> Draft:
        """Return what transformers drafts, with a head that sees tokens from `start` on."""
        rows = final_rows_of(self.model, tokens)[start:-1]
        return Draft.chain(drafted_by(self.head, rows, tokens[start:], 3))


def text_of(seq_id: int, tokens: list[int]) -> DraftText:
    return DraftText(seq_id, np.array(tokens, dtype=np.int32), num_prompt=4)


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def without_logps(drafts: list[Draft]) -> list[Draft]:
    return [each._replace(logps=()) for each in drafts]


@pytest.fixture(scope="module", params=few(VARIANTS, "glm4_moe"))
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    path = make_checkpoint(tmp_path_factory.mktemp("mtp"), request.param)
    return Heads(add_head(path))


def test_drafts_are_those_of_transformers_head(heads: Heads) -> None:
    rng = random.Random(1)
    texts = {seq_id: text(rng, length) for seq_id, length in enumerate((2, 9, 40))}
    for seq_id, tokens in texts.items():
        middle = len(tokens) // 2
        heads.take(seq_id, tokens, 0, middle)
        heads.take(seq_id, tokens, middle, len(tokens) - 1)
    for _ in range(4):  # drafts are verified: the head computes on from the target's rows
        drafts = without_logps(heads.draft(texts))
        assert drafts == [heads.expected(tokens) for tokens in texts.values()]
        for (seq_id, tokens), draft in zip(texts.items(), drafts, strict=True):
            begin = len(tokens) - 1
            tokens += [*draft.tokens[: rng.randrange(4)], rng.randrange(VOCAB_SIZE)]
            heads.take(seq_id, tokens, begin, len(tokens) - 1)
    for seq_id, tokens in texts.items():
        heads.drafter.end(text_of(seq_id, tokens))


def test_behind_a_cached_prefix_the_head_sees_what_the_target_computed(heads: Heads) -> None:
    tokens = text(random.Random(2), 30)
    heads.take(7, tokens, 16, len(tokens) - 1)
    assert without_logps(heads.draft({7: tokens})) == [heads.expected(tokens, start=16)]
    heads.drafter.end(text_of(7, tokens))


def test_a_text_of_which_rows_are_missing_has_no_draft(heads: Heads) -> None:
    tokens = text(random.Random(3), 12)
    assert heads.draft({8: tokens}) == [Draft((), ())]
    heads.take(8, tokens, 0, 7)
    assert heads.draft({8: tokens}) == [Draft((), ())]
    heads.take(8, tokens, 9, 11)  # token 9's row is there, that of token 8 is not
    assert without_logps(heads.draft({8: tokens})) == [heads.expected(tokens, start=9)]
    # Behind rows that the head has computed already.
    tokens += text(random.Random(4), 6)
    heads.take(8, tokens, 14, 17)
    assert without_logps(heads.draft({8: tokens})) == [heads.expected(tokens, start=14)]
    heads.drafter.end(text_of(8, tokens))


@pytest.mark.parametrize("variant", ["glm4_moe"])
def test_a_long_prompt_is_computed_as_its_rows_come(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_head(make_checkpoint(tmp_path, variant))
    monkeypatch.setattr("draft_nodes.mtp.MAX_CHUNK", 16)
    heads = Heads(path)
    tokens = text(random.Random(4), 60)
    passes = []
    model = heads.drafter._model
    forward = type(model).forward

    def counted(self: Any, rows: Any, **settings: Any) -> Any:
        passes.append(sum(len(each.tokens) for each in rows))
        return forward(self, rows, **settings)

    monkeypatch.setattr(type(model), "forward", counted)
    heads.take(1, tokens, 0, 40)
    assert sum(passes) == 40
    heads.take(1, tokens, 40, 59)
    assert sum(passes) == 59
    assert without_logps(heads.draft({1: tokens})) == [heads.expected(tokens)]
    assert sum(passes) == 61  # the second and third token


def test_a_head_that_nobody_drafts_with_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="attention")
    path = add_head(make_checkpoint(tmp_path, "glm4_moe"))
    load_runner(path, engine_config(path).for_node())
    assert "multi-token prediction is not read" in caplog.text
    assert "leaves unused" not in caplog.text
    caplog.clear()
    Heads(path)
    assert "prediction is not read" not in caplog.text


def test_a_checkpoint_without_the_head_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "glm4_moe")
    with pytest.raises(ConfigError, match=r'"mtp".*num_nextn_predict_layers\); this one has 0'):
        engine_config(path, speculation=MTP)
    config = changed(engine_config(path).for_node(), {"speculation": MTP})
    with pytest.raises(ConfigError, match="has 0 layers of multi-token prediction"):
        make_drafter(config, path)
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    config = engine_config(path, speculation=MTP).for_node()
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj"):
        make_drafter(config, path)


@pytest.mark.slow
@pytest.mark.skipif(not block_width(), reason="this processor leaves bf16 products to oneDNN")
@pytest.mark.parametrize("variant", VARIANTS)
def test_its_passes_are_recorded_and_draft_what_plain_ones_do(
    variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="recordings")
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128}
    path = add_head(make_checkpoint(tmp_path, variant, **sizes))
    drafted = []
    for recordings in (True, False):
        heads = Heads(path, dtype="bfloat16", recordings=recordings)
        rng, tokens = random.Random(5), text(random.Random(5), 6)
        heads.take(1, tokens, 0, 5)
        for _ in range(4):  # the same shape again and again: run, recorded, replayed
            (draft,) = heads.draft({1: tokens})
            drafted.append(draft)
            tokens += [*draft.tokens[:1], rng.randrange(VOCAB_SIZE)]
            heads.take(1, tokens, len(tokens) - 3, len(tokens) - 1)
    assert drafted[:4] == drafted[4:]
    assert "not recorded" not in caplog.text
