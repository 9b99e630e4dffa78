"""Read a checkpoint, and refuse what kvedit cannot repair exactly, naming the field.

A model is admitted by what its configuration and its modules say, not by its name: full
causal attention in every layer, RoPE whose frequencies do not depend on the sequence length,
dense, decoder-only, the module layout of Llama and Qwen3. A short comparison with the stock
forward pass (`Model.check`) catches what no field says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvedit.errors import ModelError
from kvedit.tokenizer import Tokenizer

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REMEDY = "Choose a dense Llama- or Qwen-like model with full attention; docs/models.md lists the rules."
_ABSENT: tuple[tuple[str, str], ...] = (
    ("num_local_experts", "a mixture of experts"),
    ("num_experts", "a mixture of experts"),
    ("n_routed_experts", "a mixture of experts"),
    ("attn_logit_softcapping", "soft-capped attention"),
    ("final_logit_softcapping", "soft-capped logits"),
    ("embedding_multiplier", "scaled embeddings"),
    ("residual_multiplier", "scaled residuals"),
    ("attention_multiplier", "its own attention scale"),
    ("logits_scaling", "scaled logits"),
    ("logit_scale", "scaled logits"),
    ("attention_chunk_size", "chunked attention"),
)
_LAYER_MODULES = (
    "input_layernorm",
    "post_attention_layernorm",
    "mlp",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
)
_SAMPLE_BYTES = 1 << 16


def _refuse(field: str, value: object, why: str) -> ModelError:
    return ModelError(f"This model is not supported: its `{field}` is {value!r}, {why}.", _REMEDY)


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
        value = getattr(config, name, None)
        if value not in (None, 0, 1.0):
            raise _refuse(name, value, f"which means {what}")
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
    if not isinstance(rope, dict) or "rope_type" not in rope:
        raise _refuse("rope_parameters", rope, "and one set of RoPE parameters is needed")
    if rope["rope_type"] not in ROPE_TYPES:
        why = f"and only {', '.join(ROPE_TYPES)} keep a key's rotation free of the length"
        raise _refuse("rope_type", rope["rope_type"], why)
    partial = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise _refuse("partial_rotary_factor", partial, "and the whole head must rotate")


def check_layout(network: nn.Module) -> None:
    """Refuse a network without the module layout of Llama and Qwen3.

    Raises:
        ModelError: Names the module that is not there.
    """
    wanted = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    wanted += [f"model.layers.0.{name}" for name in _LAYER_MODULES]
    for name in wanted:
        try:
            network.get_submodule(name)
        except AttributeError:
            raise ModelError(f"This model is not supported: it has no module `{name}`.", _REMEDY) from None


def read_network(
    directory: Path, dtype: torch.dtype, device: torch.device, device_map: str | dict[str, Any] | None = None
) -> Any:
    """Read the causal language model in `directory`, refusing it before its weights are read.

    Args:
        directory: Where it is.
        dtype: Of its weights.
        device: Where it goes, without a map.
        device_map: Spreads it over devices, as accelerate does: `auto`, or a device a module. The
            hooks that accelerate then puts on the modules bring their inputs to them, and weights
            that wait in the CPU's memory.

    Raises:
        ModelError: Unsupported, incomplete, damaged or too large.
    """
    transformers.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{directory} holds no model configuration that can be read ({_first_line(error)}).",
            "Give a folder with config.json, safetensors weights and tokenizer.json.",
        ) from None
    admit(config)
    if not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory} holds no weights (*.safetensors).",
            "Download the whole model, or convert its weights to safetensors.",
        )
    try:
        network: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="sdpa",
            device_map=device_map,
        )
    except Exception as error:
        # Damaged shards surface as whatever the reader of the day raises; all mean one thing.
        raise ModelError(
            f"The weights in {directory} cannot be read ({_first_line(error)}).",
            "Download the model again, or remove the folder so that it is converted anew.",
        ) from None
    check_layout(network)
    if device_map is None:
        network.to(device)
    elif "disk" in getattr(network, "hf_device_map", {}).values() or network.device.type == "meta":
        raise ModelError(
            "This model does not fit: it would have to leave layers on the disk, or its embeddings "
            "outside the first device.",
            "Choose a smaller model, a smaller --dtype, or a machine with more memory.",
        )
    return network.eval().requires_grad_(False)


def read_tokenizer(directory: Path) -> tuple[Tokenizer, Any]:
    """Read the tokenizer in `directory`; give kvedit's own and the transformers one.

    Raises:
        ModelError: There is none that can be read, or it has no fast form.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return Tokenizer(tokenizer.backend_tokenizer.to_str()), tokenizer
    except Exception as error:
        raise ModelError(
            f"{directory} holds no tokenizer that can be read ({_first_line(error)}).",
            "Download the whole model with its tokenizer.json.",
        ) from None


def fingerprint(directory: Path, tokenizer: Tokenizer, chat_template: str | None) -> dict[str, str]:
    """Say what a model is, by content: SHA-256 of its parts, by the name of the part.

    The weights are known by the size of each file and by its first, middle and last 64 KiB.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    weights = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        weights.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset, os.SEEK_SET)
                weights.update(file.read(_SAMPLE_BYTES))
    return {
        "config": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "weights": weights.hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "chat_template": hashlib.sha256((chat_template or "").encode()).hexdigest(),
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:160] if lines else type(error).__name__
