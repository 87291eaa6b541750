"""A scheduler that reserves for drafts and a node that drafts give transformers' tokens.

The policy and a real attention node, without a channel between them, always with a step planned
ahead. The drafter is scripted: it knows the oracle's tokens and spoils some of them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import torch

from attention_nodes.loading import load_runner
from models.description.config import load_model_config
from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.nodes.formation import Formation
from server.scheduler.planning.policy import Policy
from spec_decode.draft import ROOT, Draft, DraftRequest, DraftText
from tests.engine import engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from topspin.expert_table import uniform_table
from topspin.messages import AddRequest, Outputs, RequestOutput, SamplingParams, pack_ints

MAX_DRAFT = 5


class Spoiled:
    """Drafts the oracle's next tokens; each may be wrong, or have a wrong one before it."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self._texts = [p + t for p, t in zip(case.prompts, case.tokens, strict=True)]
        self._rng = rng
        self.num_tokens = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(each) for each in requests]

    def end(self, text: DraftText) -> None:
        pass

    def close(self) -> None:
        pass

    def _draft(self, request: DraftRequest) -> Draft:
        known = request.text.tokens.tolist()
        text = next(text for text in self._texts if text[: len(known)] == known)
        tokens: list[int] = []
        parents: list[int] = []
        at = ROOT
        for token in text[len(known) :]:
            for drafted in [(token + 1) % 250, token][self._rng.choice((0, 1, 1)) :]:
                tokens.append(drafted)
                parents.append(at)
            at = len(tokens) - 1
            if self._rng.random() < 0.2:
                break
        self.num_tokens += len(tokens)
        return Draft(tuple(tokens[: request.at_most]), tuple(parents[: request.at_most]))


class Engine:
    """One attention node of a dense model and its scheduler."""

    def __init__(self, case: Case, *, kv_cache_bytes: int, seed: int) -> None:
        config = engine_config(
            case.path,
            kv_cache_bytes=kv_cache_bytes,
            max_num_seqs=4,
            max_num_batched_tokens=20,
            micro_batches=2,
        )
        self.drafter = Spoiled(case, random.Random(seed))
        with torch.inference_mode():
            self.runner = load_runner(case.path, config.for_node(), drafter=self.drafter)
        self.policy = Policy(
            config,
            formation=Formation(uniform_table(num_layers=0, num_experts=0, num_nodes=1)),
            num_blocks=[self.runner.num_blocks],
            vocab_size=load_model_config(case.path).vocab_size,
            shares_cores=False,
            cost=CostModel(),
            draft_tokens=lambda request: request.arrival % (MAX_DRAFT + 1),
        )

    @torch.inference_mode()
    def generate(self, requests: Sequence[AddRequest]) -> dict[str, list[RequestOutput]]:
        outputs: dict[str, list[RequestOutput]] = {each.request_id: [] for each in requests}
        for each in requests:
            assert self.policy.add(each, peer=b"gateway", now=0.0) is None
        results = deque()
        while True:
            while (step := self.policy.schedule(0.0)) is not None:
                results.append(self.runner.execute(step.plans[0], None, index=0))
            if not results:
                return outputs
            for _, message in self.policy.update(results.popleft(), 0.0):
                assert isinstance(message, Outputs)
                for output in message.outputs:
                    outputs[output.request_id].append(output)
            self.policy.check_integrity()


def test_drafts_stops_preemptions_and_prefixes(case_of: CaseOf) -> None:
    case = case_of("llama")
    config = load_model_config(case.path)
    bytes_per_token = 2 * 4 * config.num_layers * config.kv_size
    longest = max(map(len, case.prompts)) + NUM_TOKENS
    engine = Engine(case, kv_cache_bytes=(longest + 40) * bytes_per_token, seed=3)
    # Every other request stops at a token in the middle of its output.
    ends = [NUM_TOKENS] * len(case.tokens)
    stops: list[tuple[int, ...]] = [()] * len(case.tokens)
    for idx in range(0, len(ends), 2):
        stops[idx] = (case.tokens[idx][13],)
        ends[idx] = case.tokens[idx].index(stops[idx][0]) + 1
    for turn in range(2):
        requests = [
            AddRequest(
                request_id=f"{turn}.{idx}",
                prompt=pack_ints(prompt),
                sampling=SamplingParams(
                    max_tokens=NUM_TOKENS,
                    seed=0,
                    temperature=0.0,
                    stop_token_ids=stops[idx],
                    logprobs=0,
                ),
            )
            for idx, prompt in enumerate(case.prompts)
        ]
        answers = engine.generate(requests)
        for idx, outputs in enumerate(answers.values()):
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == case.tokens[idx][: ends[idx]]
            assert outputs[-1].finish_reason == ("stop" if stops[idx] else "length")
            assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
    stats = engine.policy.stats(0, (), 0.0)
    assert stats.generation_tokens == 2 * sum(ends)
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert max(len(output.token_ids) for outputs in answers.values() for output in outputs) >= 4
