"""The checks of an engine plan: what no engine could run, and what does not fit a model.

Owns all refusals of a plan; those of two things that do not go together are a table
(topspin.plan.rules.combinations). Ranges of single fields are the fields' own, and checked where a
plan is read. Pure: knows no machine. Called by topspin.plan.from_flags, topspin.plan.file and all
who write plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from topspin.devices import check_transport, parse_device
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec, gpu_misfit
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import place_of
from topspin.plan.precision import KERNEL_FORMATS, check_rules, formats
from topspin.plan.retrieval import NUM_SUBSPACES
from topspin.plan.rules.combinations import conflicts_in
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.spec import AttentionNode, EnginePlan, NodeSpec


def check_plan(plan: EnginePlan) -> None:
    """Raise ConfigError, naming the field, for a plan that no engine could run."""
    for node in plan.nodes:
        _check_device(node)
    for nodes in (plan.attention, plan.stages, plan.experts, plan.drafts):
        _check_indices(nodes)
    _check_numbers(plan)
    _check_network(plan)
    _check_layers(plan)
    _check_cores(plan)
    _check_layer_rules(plan.kv_cache)
    for _, refusal in conflicts_in(plan):
        raise ConfigError(refusal)
    check_transport(
        [node.place for node in (*plan.attention, *plan.stages)],
        [node.place for node in plan.experts],
        plan.link.transport,
    )


def _check_device(node: NodeSpec) -> None:
    device = parse_device(f"{node}: device", node.device)
    if device == "cuda" or device != node.device:
        number = "cuda:0" if device == "cuda" else device
        raise ConfigError(f"{node}: device {node.device}: give its number, for example {number}")
    if isinstance(node, AttentionNode):
        if node.kv_cache_bytes is None and not node.place.is_gpu:
            raise ConfigError(f"{node}: kv_cache_bytes: a node on the CPU needs a size")
        if node.max_num_batched_tokens < node.max_num_seqs:
            raise ConfigError(
                f"{node}: max_num_batched_tokens (--max-num-batched-tokens) "
                f"{node.max_num_batched_tokens} is less than max_num_seqs (--max-num-seqs) "
                f"{node.max_num_seqs}: not every running sequence could advance by a token in a "
                "step"
            )


def _check_indices(nodes: Sequence[NodeSpec]) -> None:
    found = [node.index for node in nodes]
    if found != list(range(len(nodes))):
        raise ConfigError(
            f"nodes: {nodes[0].role} nodes have the indices {found}, not 0, 1, ... in order"
        )


def _check_numbers(plan: EnginePlan) -> None:
    """Check that there are nodes of the roles that an engine needs, none idle, and a link."""
    if not plan.attention:
        raise ConfigError("nodes: an engine needs an attention node")
    if len(plan.links) != 1:
        raise ConfigError(
            f"links: {len(plan.links)} of them; one link joins all attention and expert nodes"
        )
    for nodes in (plan.attention, plan.experts):
        if nodes and all(node.optional for node in nodes):
            raise ConfigError(
                f"nodes: every {nodes[0].role} node is optional; an engine serves without these, "
                "so it needs one that is not"
            )
    if not plan.drafts:
        return
    if plan.speculation is None or plan.speculation.model is None:
        raise ConfigError(
            f"{plan.drafts[0]} (--draft-nodes): there is no draft model to compute; give "
            'speculation one (--speculative-config \'{"method": "draft_model", "model": ...}\')'
        )
    if len(plan.drafts) > len(plan.attention):
        raise ConfigError(
            f"nodes: {len(plan.drafts)} draft nodes (--draft-nodes) for {len(plan.attention)} "
            "attention nodes: each of these asks one, so the others have nothing to do"
        )


def _check_network(plan: EnginePlan) -> None:
    """Check the addresses of an engine of several hosts."""
    if plan.network is None:
        return
    control = plan.network.control
    if place_of(control, name="network.control")[1] == 0:
        raise ConfigError(f"network.control {control!r} is not tcp://HOST:PORT")
    for node in plan.drafts:
        if node.address is None or not node.address.startswith("tcp://"):
            raise ConfigError(f"{node}: address {node.address}: give tcp://HOST:PORT")


def _check_layers(plan: EnginePlan) -> None:
    """Check that ranges of layers join; check_model() compares the last with the model."""
    for node in (*plan.experts, *plan.drafts):
        if node.layers is not None:
            raise ConfigError(
                f"{node}: layers {list(node.layers)}: only attention nodes and stages have some"
            )
    for stage in plan.stages:
        if stage.of >= len(plan.attention):
            raise ConfigError(f"{stage}: of {stage.of}: there is no such attention node")
    for attention in plan.attention:
        own = [stage for stage in plan.stages if stage.of == attention.index]
        if own:
            _check_chain([attention, *own])
        elif attention.layers is not None:
            raise ConfigError(
                f"{attention}: layers {list(attention.layers)}: no stage computes the others; "
                "add nodes of role stage, or leave layers out"
            )


def _check_chain(nodes: Sequence[NodeSpec]) -> None:
    """Check that each node's layers begin where those of the one before end."""
    end, before = 0, "the model begins"
    for node in nodes:
        if node.layers is None:
            raise ConfigError(f"{node}: it shares its layers with stages; give its layers")
        first, last = node.layers
        if first >= last:
            raise ConfigError(f"{node}: layers {[first, last]}: there are none")
        if first != end:
            kind = "an overlap" if first < end else "a gap"
            raise ConfigError(
                f"{node}: layers {[first, last]}: {before} at layer {end}, so this is {kind}"
            )
        end, before = last, f"{node} ends"


def _check_cores(plan: EnginePlan) -> None:
    """Check that cores belong to one node of a host only."""
    owner: dict[tuple[str, int], NodeSpec] = {}
    for node in plan.nodes:
        for core in node.cores:
            place = (node.host, core)
            if place in owner:
                raise ConfigError(f"{node}: core {core} belongs to {owner[place]} already")
            owner[place] = node


def _check_layer_rules(kept: KvCacheSpec) -> None:
    """Check that settings of single layers say something, and have what they need."""
    for idx, rule in enumerate(kept.layers):
        if rule.dtype is None and rule.retrieval is None:
            raise ConfigError(f"kv_cache.layers[{idx}]: give a dtype, or retrieval, or both")
        if rule.retrieval is not None and kept.retrieval is None:
            raise ConfigError(
                f"kv_cache.layers[{idx}].retrieval: kv_cache.retrieval "
                "(--kv-retrieval-tokens) says how many keys are selected; give it"
            )


def check_model(plan: EnginePlan, model: ModelFacts) -> None:
    """Raise ConfigError, naming the field, if `plan` does not fit the checkpoint."""
    if plan.model.max_model_len > model.max_positions:
        raise ConfigError(
            f"model.max_model_len (--max-model-len) {plan.model.max_model_len}: the model has "
            f"positions up to {model.max_positions}, which model.hf_overrides (--hf-overrides) can "
            "extend"
        )
    if plan.scheduling.prefix_caching and not model.shares_prefixes:
        raise ConfigError(
            "scheduling.prefix_caching: this model rotates a key by its own prompt's length, so "
            "prompts cannot share keys; set it to false"
        )
    _check_experts(plan, model)
    _check_ends(plan, model.num_layers)
    check_precision(plan, model)
    windows = model.windows or (None,) * model.num_layers
    _check_windows(plan.kv_cache, windows)
    _check_retrieval(plan.kv_cache, windows, model)
    _check_heads(plan, model)
    _check_mtp(plan, model)


def check_precision(plan: EnginePlan, model: ModelFacts) -> None:
    """Raise ConfigError if a rule does not fit the checkpoint, or a node's kernels."""
    for node in (*plan.attention, *plan.stages, *plan.experts):
        check_rules(
            plan.precision,
            num_layers=model.num_layers,
            moe_layers=model.moe_layers,
            num_experts=model.num_experts,
            kernels={node.role if node.role == "expert" else "attention": node.kernels},
        )
    if plan.local_experts is None:
        return
    for node in plan.attention:
        unknown = formats(plan.precision, "expert") - set(KERNEL_FORMATS.get(node.kernels, ()))
        if unknown:
            raise ConfigError(
                f"local_experts: {node} is to hold experts in {', '.join(sorted(unknown))}, which "
                f"its kernels {node.kernels} do not have"
            )


def _check_experts(plan: EnginePlan, model: ModelFacts) -> None:
    """Check that every routed expert has a place, also without the nodes that are optional."""
    if plan.experts and not model.num_experts:
        raise ConfigError(f"nodes: {len(plan.experts)} expert nodes for a dense model")
    if plan.local_experts is not None:
        _check_local(plan.local_experts, model.moe_layers, num_expert_nodes=len(plan.experts))
    elif model.num_experts and not plan.experts:
        raise ConfigError(
            f"nodes: no expert node for a model with {model.num_experts} routed experts per layer"
        )
    for node in plan.experts:
        if node.experts > model.num_experts:
            raise ConfigError(
                f"{node}: experts {node.experts}: the model has {model.num_experts} per layer, and "
                "a node holds no second copy"
            )
    for kind, nodes in (
        ("expert nodes", plan.experts),
        ("expert nodes that are not optional", [n for n in plan.experts if not n.optional]),
    ):
        held = [node.experts for node in nodes]
        if plan.experts and sum(held) < model.num_experts:
            raise ConfigError(
                f"nodes: {kind} hold {' + '.join(map(str, held))} experts per layer of the model's "
                f"{model.num_experts}, all of which the engine must serve with these"
            )


def _check_local(local: LocalExperts, moe_layers: Sequence[int], *, num_expert_nodes: int) -> None:
    """Check that local layers have routed experts, and expert nodes what to do."""
    if list(local.layers) != sorted(set(local.layers)):
        raise ConfigError(f"local_experts.layers {list(local.layers)}: must ascend")
    for layer in local.layers:
        if layer not in moe_layers:
            raise ConfigError(
                f"local_experts.layers: layer {layer} has no routed experts; the model has "
                f"them in {_ranges(moe_layers)}"
            )
    is_whole = local.when == "always" and len(local.layers) == len(moe_layers)
    if is_whole and num_expert_nodes:
        raise ConfigError(
            f"local_experts: always local in all layers: {num_expert_nodes} expert nodes would "
            "have nothing to do; leave them out, or set when to measured"
        )
    if not is_whole and not num_expert_nodes:
        raise ConfigError(
            "local_experts: without expert nodes every MoE layer must be always local; name "
            "all of them, or add expert nodes"
        )


def _ranges(layers: Sequence[int]) -> str:
    """Return layers as text: "3 to 26", or "none"."""
    if not layers:
        return "none"
    is_run = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if is_run else ", ".join(map(str, layers))


def _check_ends(plan: EnginePlan, num_layers: int) -> None:
    """Check that the last stage of each attention node ends with the model."""
    for attention in plan.attention:
        own = [stage for stage in plan.stages if stage.of == attention.index]
        if own and own[-1].layers is not None and own[-1].layers[1] != num_layers:
            raise ConfigError(
                f"{own[-1]}: layers {list(own[-1].layers)}: the model has {num_layers} layers, and "
                f"this is the last stage of {attention}"
            )


def _check_windows(kept: KvCacheSpec, windows: Sequence[int | None]) -> None:
    """Check that settings of single layers fit the layers of a model, by their windows."""
    last = len(windows) - 1
    for idx, rule in enumerate(kept.layers):
        beyond = [layer for layer in rule.layers if layer > last]
        if beyond:
            raise ConfigError(
                f"kv_cache.layers[{idx}]: layer {beyond[0]}: the model has layers 0 to {last}"
            )
        narrow = [layer for layer in rule.layers if windows[layer] is not None]
        if rule.retrieval and narrow:
            raise ConfigError(
                f"kv_cache.layers[{idx}].retrieval: layer {narrow[0]} has a window of "
                f"{windows[narrow[0]]} tokens, in which all keys are attended to"
            )


def _check_heads(plan: EnginePlan, model: ModelFacts) -> None:
    """Check that attention nodes and stages have kernels for a model's heads."""
    misfit = gpu_misfit(model.head_dim or 0, model.latent_rank)
    for node in (*plan.attention, *plan.stages):
        if node.kernels == "triton" and misfit is not None:
            raise ConfigError(f"{node}: kernels triton: {misfit}; that on CPUs takes them")


def _check_mtp(plan: EnginePlan, model: ModelFacts) -> None:
    """Check that a checkpoint carries the head that is to draft."""
    if plan.speculation is None or plan.speculation.method != "mtp" or model.num_mtp_layers == 1:
        return
    raise ConfigError(
        f'speculation (--speculative-config): the method "mtp" needs a checkpoint with one layer '
        f"of multi-token prediction (num_nextn_predict_layers); this one has {model.num_mtp_layers}"
    )


def _check_retrieval(kept: KvCacheSpec, windows: Sequence[int | None], model: ModelFacts) -> None:
    """Check that a model's keys can be selected, and spilled, as is asked for."""
    if kept.retrieval is None:
        return
    name = "kv_cache.retrieval (--kv-retrieval-tokens)"
    if model.latent_rank is not None:
        raise ConfigError(f"{name}: latents, which are the keys of all heads, are not coded")
    if model.head_dim is not None and model.head_dim % NUM_SUBSPACES:
        raise ConfigError(
            f"{name}: keys of {model.head_dim} numbers are not coded; that must be a multiple of "
            f"{NUM_SUBSPACES}"
        )
    if not any(window is None and kept.retrieves(idx) for idx, window in enumerate(windows)):
        raise ConfigError(
            f"{name}: all layers of the model have a window, or no retrieval by kv_cache.layers"
        )
    widest = max((each for each in windows if each is not None), default=None)
    if kept.spill is not None and widest is not None:
        raise ConfigError(
            f"kv_cache.spill (--kv-spill-dir): the model has layers with a window of {widest} "
            "tokens, whose keys must be in memory"
        )
