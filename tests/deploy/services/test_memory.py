"""The memory that containers ask for, against what is stored."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from deploy.placement.shapes import ModelShape
from deploy.services.memory import MARGIN, memory_of
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from tests.mtp_heads import FILE, add_head
from topspin.plan.speculation import Speculation


def test_a_head_of_multi_token_prediction_counts_on_attention_nodes(tmp_path: Path) -> None:
    path = add_head(make_checkpoint(tmp_path, "glm4_moe"))
    model = load_model_config(path)
    tensors = load_file(path / FILE)
    stored = 4 * sum(each.numel() for name, each in tensors.items() if ".layers.3." in name)
    shape = ModelShape.from_config(model, dtype="float32")

    def asked(**settings: object) -> int:
        plan = engine_config(path, **settings)
        found = memory_of(plan, shape)(plan.attention[0])
        assert found is not None
        assert plan.attention[0].kv_cache_bytes is not None
        return found

    plan = engine_config(path)
    cache = (plan.attention[0].kv_cache_bytes or 0) // model.num_layers
    more = asked(speculation=Speculation(method="mtp")) - asked()
    assert abs(more - MARGIN * (stored + cache)) <= 1
    assert asked(speculation=Speculation(method="suffix")) == asked()
