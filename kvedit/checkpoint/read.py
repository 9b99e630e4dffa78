"""Read the network and the tokenizer of a checkpoint with transformers."""

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
    """Read the causal language model in `directory`; check that it is supported before reading weights.

    Args:
        directory: Folder with config.json and safetensors weights.
        dtype: Dtype of the weights.
        device: Device of the weights if there is no map.
        device_map: `auto`, or a device for each module. accelerate's hooks then move inputs, and weights
            offloaded to CPU memory, to each module's device.

    Raises:
        ModelError: The model is unsupported, incomplete, damaged or too large.
    """
    transformers.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    config = _read_config(directory)
    admit(config)
    check_layout(outline(config))
    _check_files(directory)
    try:
        network, loading_info = AutoModelForCausalLM.from_pretrained(
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
        # The exception for a damaged file depends on the reader and its version.
        raise ModelError(
            f"The weights in {directory} cannot be read ({brief(error)}).",
            "Download the model again, or remove the folder so that the model is converted again.",
        ) from None
    check_complete(loading_info, directory)
    if device_map is None:
        network.to(device)
    elif "disk" in getattr(network, "hf_device_map", {}).values() or network.device.type == "meta":
        raise ModelError(
            "This model does not fit in memory: layers would stay on disk, or the embeddings would not be "
            "on the first device.",
            "Choose a smaller model, a smaller --dtype, or a machine with more memory.",
        )
    return network.eval().requires_grad_(False)


def _check_files(directory: Path) -> None:
    """Refuse a folder without safetensors weights."""
    if not any(directory.glob("*.safetensors")):
        pickled = any(path for pattern in _PICKLES for path in directory.glob(pattern))
        why = ", only pickle files, which can run code when they are read" if pickled else ""
        raise ModelError(
            f"{directory} has no safetensors weights{why}.",
            "Download the complete model, or convert its weights to safetensors.",
        )


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # A wrong type, an unknown model type, custom code, invalid JSON: each raises a different class.
        raise ModelError(
            f"{directory} has no readable model configuration ({brief(error)}).",
            "Give a folder with config.json, safetensors weights and tokenizer.json.",
        ) from None


def outline(config: Any) -> nn.Module:
    """Build the network on the meta device, to inspect it before its weights are read.

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


def check_complete(loading_info: dict[str, Any], source: Path) -> None:
    """Refuse weights that lack a tensor, which transformers would fill with random numbers.

    Args:
        loading_info: Returned by transformers when it loads weights.
        source: Folder or file of the weights.

    Raises:
        ModelError: A tensor is missing.
    """
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights in {source} are incomplete: {len(missing)} tensors are missing, "
            f"such as `{missing[0]}`.",
            "Download the model again, or remove the folder so that the model is converted again.",
        )


def read_tokenizer(directory: Path) -> tuple[Tokenizer, Any]:
    """Read the tokenizer in `directory`; return kvedit's and the transformers tokenizer.

    Raises:
        ModelError: There is no readable tokenizer, or it has no fast version.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return Tokenizer(tokenizer.backend_tokenizer.to_str()), tokenizer
    except Exception as error:
        raise ModelError(
            f"{directory} has no readable tokenizer ({brief(error)}).",
            "Download the complete model, including tokenizer.json.",
        ) from None


def brief(error: Exception) -> str:
    """Return the class and the start of the text of an error on one line, for a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160].rstrip(".: ")
