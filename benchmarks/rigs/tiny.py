"""Tiny random checkpoints, with which tests check the algebra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
TIED_BIASES = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}


def part_of(share: float) -> dict[str, Any]:
    """Return the parameters of RoPE that rotates a share of each head's dimensions."""
    return {**DEFAULT, "partial_rotary_factor": share}


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": DEFAULT}),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": DEFAULT}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": DEFAULT}),
    "mistral": (MistralConfig, MistralForCausalLM, {"rope_parameters": DEFAULT, "sliding_window": None}),
    # Tied embeddings, biases everywhere, and a head dimension other than hidden / heads.
    "llama-tied-biases": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": DEFAULT, **TIED_BIASES}),
    # The first quarter and the first half of each head are rotated.
    "stablelm": (StableLmConfig, StableLmForCausalLM, {"rope_parameters": part_of(0.25)}),
    "nemotron": (NemotronConfig, NemotronForCausalLM, {"rope_parameters": part_of(0.5)}),
}
CORPUS = [
    "The fees are paid within thirty days of the invoice. The customer may cancel at any time.",
    "One of the codes for the amber-anchor is 4471. Notices are sent in writing, by post or e-mail.",
    "def total(items):\n    return sum(item.price for item in items)\n\n\nclass Order:\n    pass\n",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma\n",
] * 4


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model of that kind: grouped KV heads, three layers."""
    make, _, more = KINDS[kind]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return make(**{**sizes, **more, **changes})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 512 ids with a chat template; any text round-trips."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, "\n\n\n\n \n\n\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random checkpoint of that kind, with a tokenizer; return its folder."""
    torch.manual_seed(seed)
    network = KINDS[kind][1](tiny_config(kind, **changes))
    for name, weights in network.named_parameters():
        if name.endswith("bias"):  # initially zeros, which would test nothing
            torch.nn.init.normal_(weights, std=0.2)
    network.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
