"""Refuse models whose cache kvedit cannot repair exactly, before their weights are read.

A model is admitted by its configuration and modules, not by its name: full causal attention in every layer,
RoPE whose frequencies do not depend on the sequence length, dense, decoder-only, with the module layout of
Llama and Qwen3. A short comparison with the stock forward pass (`Stock.compare`) catches what these do not
show.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from kvedit.cache.rope import rotate
from kvedit.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REMEDY = (
    "Choose a dense Llama- or Qwen-like model with full attention; docs/models.md lists the requirements."
)
_ABSENT: tuple[tuple[str, str], ...] = (
    ("quantization_config", "quantized weights"),
    ("kv_lora_rank", "latent attention (MLA)"),
    ("mamba_d_state", "recurrent layers"),
    ("state_size", "recurrent layers"),
    ("alibi", "ALiBi instead of RoPE"),
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
    ("mrope_section", "multidimensional positions (M-RoPE)"),
    ("llama_4_scaling_beta", "queries scaled by their position"),
)
_LAYER_MODULES = ("input_layernorm", "post_attention_layernorm", "mlp", "self_attn")
_ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_ATTENTION_EXTRA = ("q_norm", "k_norm", "rotary_emb")


def _refuse(field: str, value: object, why: str) -> ModelError:
    return ModelError(f"This model is not supported: its `{field}` is {value!r}, {why}.", REMEDY)


def _field(config: Any, name: str) -> Any:
    """Read a field; return `None` if it is missing.

    Raises:
        ModelError: It differs between layers, for which transformers raises its own error.
    """
    try:
        return getattr(config, name, None)
    except Exception:
        raise _refuse(name, "set", "and differs between layers") from None


def admit(config: Any) -> None:
    """Refuse a configuration whose cache cannot be repaired exactly.

    Args:
        config: A transformers configuration.

    Raises:
        ModelError: The model is not supported; names the field.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse("is_encoder_decoder", True, "but only decoder-only models are supported")
    for name in ("vision_config", "audio_config", "text_config"):
        if getattr(config, name, None) is not None:
            raise _refuse(name, "set", "but only text models are supported")
    for name, what in _ABSENT:
        value = _field(config, name)
        if value is True or value not in (None, 0, 1.0):
            raise _refuse(name, value if isinstance(value, int | float) else "set", f"which means {what}")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise _refuse("layer_types", kind, "but every layer must have full attention")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise _refuse("sliding_window", window, "but every layer must have full attention")
    rope_free = getattr(config, "no_rope_layers", None)
    if rope_free and not all(rope_free):
        raise _refuse("no_rope_layers", rope_free, "but every layer must have RoPE")
    _admit_rope(config)


def _admit_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        why = "so it has ALiBi, learned positions or none instead of RoPE, and keys cannot be moved"
        raise _refuse("rope_parameters", None, why)
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise _refuse("rope_parameters", rope, "but exactly one set of RoPE parameters is needed")
    if rope["rope_type"] not in ROPE_TYPES:
        why = f"but only {', '.join(ROPE_TYPES)} rotate keys independently of the length"
        raise _refuse("rope_type", rope["rope_type"], why)
    for name, what in _ROPE_ABSENT:
        if rope.get(name) is not None:
            raise _refuse(name, rope[name], f"which means {what}")


def check_layout(network: Any) -> None:
    """Refuse a network that lacks a module of Llama and Qwen3, or has additional ones.

    Reads only modules and shapes, so the network can be on the meta device.

    Raises:
        ModelError: Names the missing or additional module, or the field.
    """
    required = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    required += [f"model.layers.0.{name}" for name in _LAYER_MODULES]
    required += [f"model.layers.0.self_attn.{name}" for name in _ATTENTION_MODULES]
    for name in required:
        try:
            network.get_submodule(name)
        except AttributeError:
            raise ModelError(f"This model is not supported: it has no module `{name}`.", REMEDY) from None
    for inner, known in (("", _LAYER_MODULES), (".self_attn", (*_ATTENTION_MODULES, *_ATTENTION_EXTRA))):
        for name, module in network.get_submodule(f"model.layers.0{inner}").named_children():
            if name not in known and not isinstance(module, nn.Dropout | nn.Identity):
                raise ModelError(
                    f"This model is not supported: it has an unknown module `model.layers.0{inner}.{name}`.",
                    REMEDY,
                )
    _check_rotation(network)


def _check_rotation(network: Any) -> None:
    """Refuse a network that rotates different dimensions of a head, or pairs them differently.

    The network's own function is called if it has the usual name; `Stock.compare` checks the keys anyway.
    """
    attention = network.model.layers[0].self_attn
    width, turned = attention.head_dim, 2 * len(network.model.rotary_emb.inv_freq)
    rope = network.config.rope_parameters
    part = rope.get("partial_rotary_factor") or 1.0
    if turned != int(width * part):
        why = f"but {turned} of the {width} dimensions of a head are rotated"
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
        why = "but it does not pair the first half of the rotated dimensions with the second"
        raise _refuse("rope_parameters", {"rope_type": rope["rope_type"], "partial_rotary_factor": part}, why)
