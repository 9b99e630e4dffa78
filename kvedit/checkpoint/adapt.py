"""Build a network whose parts are modules of transformers.

The parts call the modules, so that accelerate's hooks on them move inputs and weights to their devices.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvedit.model.network import Head, Joined, Layer, Network, Sizes


def from_transformers(network: Any) -> Network:
    """Return a network of the modules of a causal language model that `check_layout` admitted.

    Args:
        network: The transformers model, on its devices.
    """
    inner, config = network.model, network.config
    attention, rotary = inner.layers[0].self_attn, inner.rotary_emb
    table: Tensor = inner.embed_tokens.weight
    sizes = Sizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_key_value_heads,
        groups=config.num_attention_heads // config.num_key_value_heads,
        width=attention.head_dim,
        scaling=attention.scaling,
        context_length=config.max_position_embeddings,
        inverse_frequencies=tuple(rotary.inv_freq.float().tolist()),
        attention_scaling=float(rotary.attention_scaling),
        tied=network.lm_head.weight is table,
    )
    return Network(
        sizes=sizes,
        table=table,
        layers=tuple(map(_layer, inner.layers)),
        norm=inner.norm,
        head=Head(lambda: (network.lm_head,)),
        dtype=network.dtype,
        device=network.device,
        spread=len(set(getattr(network, "hf_device_map", {}).values())) > 1,
    )


def _layer(module: Any) -> Layer:
    attention = module.self_attn
    return Layer(
        attention_norm=module.input_layernorm,
        projection=Joined((attention.q_proj, attention.k_proj, attention.v_proj)),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        output=attention.o_proj,
        mlp_norm=module.post_attention_layernorm,
        mlp=(module.mlp,),
    )
