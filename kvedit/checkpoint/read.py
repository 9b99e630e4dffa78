"""Read a checkpoint that is admitted, with transformers: its network and its tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvedit.checkpoint.admission import REMEDY, admit, check_layout
from kvedit.errors import ModelError
from kvedit.tokens.tokenizer import Tokenizer

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_network(
    directory: Path, dtype: torch.dtype, device: torch.device, device_map: str | dict[str, Any] | None = None
) -> Any:
    """Read the causal language model in `directory`, refusing it before its weights are read.

    Args:
        directory: Folder with config.json and safetensors weights.
        dtype: Of its weights.
        device: Of its weights, if there is no map.
        device_map: `auto`, or a device for each module. Hooks of accelerate then bring inputs, and weights
            that wait in the CPU's memory, to each module's device.

    Raises:
        ModelError: Unsupported, incomplete, damaged or too large.
    """
    transformers.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    config = _read_config(directory)
    admit(config)
    check_layout(outline(config))
    _check_files(directory)
    try:
        network, found = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
            device_map=device_map,
            output_loading_info=True,
        )
    except Exception as error:
        # Damaged shards surface as whatever the reader of the day raises; all mean one thing.
        raise ModelError(
            f"The weights in {directory} cannot be read ({brief(error)}).",
            "Download the model again, or remove the folder so that it is converted anew.",
        ) from None
    check_whole(found, directory)
    if device_map is None:
        network.to(device)
    elif "disk" in getattr(network, "hf_device_map", {}).values() or network.device.type == "meta":
        raise ModelError(
            "This model does not fit: it would have to leave layers on the disk, or its embeddings "
            "outside the first device.",
            "Choose a smaller model, a smaller --dtype, or a machine with more memory.",
        )
    return network.eval().requires_grad_(False)


def _check_files(directory: Path) -> None:
    """Refuse a folder without safetensors weights."""
    if not any(directory.glob("*.safetensors")):
        pickled = any(path for pattern in _PICKLES for path in directory.glob(pattern))
        why = " but pickles, which can run code when they are read" if pickled else ""
        raise ModelError(
            f"{directory} holds no weights (*.safetensors){why}.",
            "Download the whole model, or convert its weights to safetensors.",
        )


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # A wrong type, an unknown kind, code of its own, no JSON: each raises something else.
        raise ModelError(
            f"{directory} holds no model configuration that can be read ({brief(error)}).",
            "Give a folder with config.json, safetensors weights and tokenizer.json.",
        ) from None


def outline(config: Any) -> nn.Module:
    """Build the network without weights, so that it can be looked at before they are read.

    Raises:
        ModelError: It cannot be built.
    """
    try:
        with torch.device("meta"):
            network: nn.Module = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False, attn_implementation="sdpa"
            )
    except Exception as error:
        raise ModelError(
            f"This model is not supported: its layers cannot be built ({brief(error)}).", REMEDY
        ) from None
    return network


def check_whole(found: dict[str, Any], source: Path) -> None:
    """Refuse weights that lack a tensor: transformers would put random numbers in its place.

    Args:
        found: What transformers says that it loaded.
        source: Where from.

    Raises:
        ModelError: Names a tensor.
    """
    missing = sorted(found["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {source} are not whole: {len(missing)} tensors are missing, "
            f"such as `{missing[0]}`.",
            "Download the model again, or remove the folder so that it is converted anew.",
        )


def read_tokenizer(directory: Path) -> tuple[Tokenizer, Any]:
    """Read the tokenizer in `directory`; give kvedit's own and the transformers one.

    Raises:
        ModelError: There is none that can be read, or it has no fast form.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return Tokenizer(tokenizer.backend_tokenizer.to_str()), tokenizer
    except Exception as error:
        raise ModelError(
            f"{directory} holds no tokenizer that can be read ({brief(error)}).",
            "Download the whole model with its tokenizer.json.",
        ) from None


def brief(error: Exception) -> str:
    """Give the kind of an error and the beginning of what it says, on one line, for a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160].rstrip(".: ")
