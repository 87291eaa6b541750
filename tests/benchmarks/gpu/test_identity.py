"""The engine of `make gpu` gives transformers' tokens: on a GPU, or interpreted without one.

Needs only torch, Triton, transformers and msgspec, so that a bare machine with a GPU can check that
the steps it times are right: prefill in chunks, decode steps enqueued and recorded, one stream and
two.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.engine import BLOCK_SIZE, GpuEngine, node_config
from benchmarks.gpu.workload import QUICK
from deploy.rig.nodes import model_of
from deploy.rig.random_weights import RandomWeights
from deploy.rig.steps import Batch
from kernels.runtime import open_runtime
from models.description.config import ModelConfig

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
slow_interpreted = [] if HAS_GPU else [pytest.mark.slow]
DEVICE = "cuda:0" if HAS_GPU else "cpu"

PROMPT, DECODED = 11, 4
WORKLOAD = replace(
    QUICK,
    fields={**QUICK.fields, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64},
    context=PROMPT + DECODED,
    batches=(1,),
    prefill_tokens=8,
)
"""Prefill takes two steps; the second one reads the keys that the first one cached."""


def oracle(model: ModelConfig, prompt: list[int]) -> tuple[list[int], float]:
    """Return transformers' greedy tokens on the CPU and the least lead over the second choice."""
    transformers = pytest.importorskip("transformers")
    device = torch.device(DEVICE)
    drawn = RandomWeights(model, device=device, dtype=torch.float32)
    fields = {name: each for name, each in WORKLOAD.fields.items() if name != "torch_dtype"}
    config = transformers.Qwen3MoeConfig(**fields)
    oracle = transformers.Qwen3MoeForCausalLM(config).eval()
    weights = drawn.attention()
    named = {"model.embed_tokens.weight": weights.embed, "lm_head.weight": weights.lm_head}
    named["model.norm.weight"] = weights.final_norm
    sizes = (model.q_size, model.kv_size, model.kv_size)
    for idx, layer in enumerate(weights.layers):
        at = f"model.layers.{idx}"
        for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
            named[f"{at}.self_attn.{name}_proj.weight"] = part
        named |= {
            f"{at}.self_attn.o_proj.weight": layer.o,
            f"{at}.self_attn.q_norm.weight": layer.q_norm,
            f"{at}.self_attn.k_norm.weight": layer.k_norm,
            f"{at}.mlp.gate.weight": layer.router.weight if layer.router else None,
            f"{at}.input_layernorm.weight": layer.input_norm,
            f"{at}.post_attention_layernorm.weight": layer.post_norm,
        }
    for idx, stream in enumerate(drawn.experts()):
        named[f"model.layers.{idx}.mlp.experts.gate_up_proj"] = torch.stack(list(stream.gate_up))
        named[f"model.layers.{idx}.mlp.experts.down_proj"] = torch.stack(list(stream.down))
    oracle.load_state_dict({name: tensor.cpu() for name, tensor in named.items()})
    ids, leads = list(prompt), []
    with torch.inference_mode():
        for _ in range(DECODED + 1):
            best, token = oracle(torch.tensor([ids])).logits[0, -1].topk(2)
            leads.append(float(best[0] - best[1]))
            ids.append(int(token[0]))
    return ids[len(prompt) :], min(leads)


@pytest.mark.parametrize(
    "cuda_graphs",
    [True, pytest.param(False, marks=slow_interpreted)],
    ids=lambda cuda_graphs: "graphs" if cuda_graphs else "no graphs",
)
@pytest.mark.slow
def test_tokens_are_transformers(cuda_graphs: bool) -> None:
    model = model_of(WORKLOAD.fields)
    config = node_config(model, WORKLOAD, DEVICE, cuda_graphs=cuda_graphs)
    engine = GpuEngine(model, config, open_runtime(config.node.device))
    engine.prefill(PROMPT)
    batch = Batch(range(PROMPT), block_size=BLOCK_SIZE, vocab_size=model.vocab_size)
    plans = batch.prefill(PROMPT, most=config.attention.max_num_batched_tokens)
    prompt = np.frombuffer(plans[0].new[0].tokens, dtype="<i4").tolist()
    assert (len(plans), len(prompt)) == (2, PROMPT)
    tokens = []
    for _ in range(DECODED + 1):
        engine.finish()
        assert engine.last_result is not None
        tokens += np.frombuffer(engine.last_result.tokens, dtype="<i4").tolist()
        engine.decode_step()
    engine.close()
    expected, lead = oracle(model, prompt)
    assert lead > 1e-3
    assert tokens == expected
    assert len(set(tokens)) > 1
