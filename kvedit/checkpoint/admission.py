"""Refuse what kvedit cannot repair exactly, naming the field or the module, before weights are read.

A model is admitted by what its configuration and its modules say, not by its name: full causal
attention in every layer, RoPE whose frequencies do not depend on the sequence length, dense,
decoder-only, the module layout of Llama and Qwen3. A short comparison with the stock forward
pass (`Stock.compare`) catches what neither says.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from kvedit.cache.rope import rotate
from kvedit.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REMEDY = "Choose a dense Llama- or Qwen-like model with full attention; docs/models.md lists the rules."
_ABSENT: tuple[tuple[str, str], ...] = (
    ("quantization_config", "quantised weights"),
    ("kv_lora_rank", "latent attention (MLA)"),
    ("mamba_d_state", "recurrent layers"),
    ("state_size", "recurrent layers"),
    ("alibi", "ALiBi in place of RoPE"),
    ("num_local_experts", "a mixture of experts"),
    ("num_experts", "a mixture of experts"),
    ("n_routed_experts", "a mixture of experts"),
    ("moe_num_experts", "a mixture of experts"),
    ("attn_logit_softcapping", "soft-capped attention"),
    ("final_logit_softcapping", "soft-capped logits"),
    ("embedding_multiplier", "scaled embeddings"),
    ("residual_multiplier", "scaled residuals"),
    ("attention_multiplier", "its own attention scale"),
    ("logits_scaling", "scaled logits"),
    ("logit_scale", "scaled logits"),
    ("attention_chunk_size", "chunked attention"),
    ("clip_qkv", "clipped queries, keys and values"),
)
_ROPE_ABSENT: tuple[tuple[str, str], ...] = (
    ("mrope_section", "positions of more than one dimension (M-RoPE)"),
    ("llama_4_scaling_beta", "queries that are scaled by their position"),
)
_LAYER_MODULES = ("input_layernorm", "post_attention_layernorm", "mlp", "self_attn")
_ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_ATTENTION_EXTRA = ("q_norm", "k_norm", "rotary_emb")


def _refuse(field: str, value: object, why: str) -> ModelError:
    return ModelError(f"This model is not supported: its `{field}` is {value!r}, {why}.", REMEDY)


def _field(config: Any, name: str) -> Any:
    """Read a field that may not be there.

    Raises:
        ModelError: It is another one in each layer, for which transformers has an error of its own.
    """
    try:
        return getattr(config, name, None)
    except Exception:
        raise _refuse(name, "set", "and another in each layer") from None


def admit(config: Any) -> None:
    """Refuse a configuration whose cache cannot be repaired exactly.

    Args:
        config: A transformers configuration.

    Raises:
        ModelError: Names the field that refused it.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse("is_encoder_decoder", True, "and only decoder-only models are")
    for name in ("vision_config", "audio_config", "text_config"):
        if getattr(config, name, None) is not None:
            raise _refuse(name, "set", "and only plain text models are")
    for name, what in _ABSENT:
        value = _field(config, name)
        if value is True or value not in (None, 0, 1.0):
            raise _refuse(name, value if isinstance(value, int | float) else "set", f"which means {what}")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise _refuse("layer_types", kind, "and every layer must have full attention")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise _refuse("sliding_window", window, "and every layer must have full attention")
    rope_free = getattr(config, "no_rope_layers", None)
    if rope_free and not all(rope_free):
        raise _refuse("no_rope_layers", rope_free, "and every layer must have RoPE")
    _admit_rope(config)


def _admit_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        why = "so it has no RoPE (but ALiBi, learned positions or none), and a key cannot be moved"
        raise _refuse("rope_parameters", None, why)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise _refuse("rope_parameters", rope, "and one set of RoPE parameters is needed")
    if rope["rope_type"] not in ROPE_TYPES:
        why = f"and only {', '.join(ROPE_TYPES)} keep a key's rotation free of the length"
        raise _refuse("rope_type", rope["rope_type"], why)
    for name, what in _ROPE_ABSENT:
        if rope.get(name) is not None:
            raise _refuse(name, rope[name], f"which means {what}")


def check_layout(network: Any) -> None:
    """Refuse a network without the module layout of Llama and Qwen3, or with more than it.

    Looks at modules and shapes only, so the network may be on the meta device.

    Raises:
        ModelError: Names the module that is not there, that should not be there, or the field.
    """
    wanted = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    wanted += [f"model.layers.0.{name}" for name in _LAYER_MODULES]
    wanted += [f"model.layers.0.self_attn.{name}" for name in _ATTENTION_MODULES]
    for name in wanted:
        try:
            network.get_submodule(name)
        except AttributeError:
            raise ModelError(f"This model is not supported: it has no module `{name}`.", REMEDY) from None
    for inner, known in (("", _LAYER_MODULES), (".self_attn", (*_ATTENTION_MODULES, *_ATTENTION_EXTRA))):
        for name, module in network.get_submodule(f"model.layers.0{inner}").named_children():
            if name not in known and not isinstance(module, nn.Dropout | nn.Identity):
                raise ModelError(
                    f"This model is not supported: it has a module `model.layers.0{inner}.{name}`, "
                    "which kvedit does not know.",
                    REMEDY,
                )
    _check_rotation(network)


def _check_rotation(network: Any) -> None:
    """Refuse a network that turns other dimensions of a head than its configuration says, or other pairs.

    Its own function is tried where it has the usual name; `Stock.compare` compares the keys in any case.
    """
    attention = network.model.layers[0].self_attn
    width, turned = attention.head_dim, 2 * len(network.model.rotary_emb.inv_freq)
    rope = network.config.rope_parameters
    part = rope.get("partial_rotary_factor") or 1.0
    if turned != int(width * part):
        why = f"and {turned} of the {width} dimensions of a head turn"
        raise _refuse("partial_rotary_factor", rope.get("partial_rotary_factor"), why)
    own = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return
    source = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, turned, generator=source)
    half = torch.randn(3, turned // 2, generator=source)
    other = half.flip(0)
    cos, sin, own_sin = (
        torch.cat(parts, dim=-1) for parts in ((half, half), (-other, other), (other, other))
    )
    try:
        same = torch.equal(
            own(states[None], states[None], cos[None], own_sin[None])[1][0], rotate(states, cos, sin)
        )
    except (RuntimeError, TypeError, ValueError):
        same = False
    if not same:
        why = "and it turns other pairs of dimensions (such as neighbours) than the two halves"
        raise _refuse("rope_parameters", {"rope_type": rope["rope_type"], "partial_rotary_factor": part}, why)
