"""Convert a GGUF checkpoint to a folder with float16 safetensors.

transformers is imported only when a file is converted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvedit.errors import ModelError
from kvedit.store.files import make_folder, writing

# Values of `tokenizer.ggml.pre`, which names how a byte-level tokenizer splits text before merging bytes (see
# llama-vocab in llama.cpp). transformers supports some splits and uses GPT-2's for all others. That is right
# for the first set, and for the second one once digits are split into single digits.
_GPT2_SPLIT = frozenset({"gpt-2", "mpt", "olmo", "jais", "roberta-bpe"})
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# These vocabularies have words that merges cannot produce and that are matched as a whole. Their text starts
# with BOS, even if an older file lacks `tokenizer.ggml.add_bos_token`.
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})


def convert_gguf(source: Path, target: Path) -> None:
    """Convert `source` to the folder `target`, which is created atomically.

    Raises:
        ModelError: The file is damaged, or transformers cannot read its architecture.
    """
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        pre, config, tokenizer = _read_metadata(source)
        network = _read_network(source, config)
    except ModelError:
        raise
    except Exception as error:
        # On damaged data, the GGUF reader can raise anything.
        from kvedit.checkpoint.read import brief

        raise ModelError(
            f"{source} cannot be converted ({brief(error)}).",
            "Check that the download is complete, or give the model's original folder.",
        ) from None
    make_folder(target.parent)
    with writing(target):
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with writing(target):
            network.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            _complete_tokenizer(partial / "tokenizer.json", pre)
            partial.chmod(0o755)
            if target.exists():  # another process was first
                return
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_metadata(source: Path) -> tuple[str | None, Any, Any]:
    """Read the name of a file's split (see above), its configuration and its tokenizer.

    Raises:
        ModelError: The model is not supported, or its ids would be wrong.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    from kvedit.checkpoint.admission import admit, check_layout
    from kvedit.checkpoint.read import outline

    metadata, _ = read_gguf_metadata(str(source))
    byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    pre = metadata.get("tokenizer.ggml.pre") if byte_level else None
    supported = _GPT2_SPLIT | _DIGITS_APART | _WHOLE_WORDS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if byte_level and pre not in supported:
        raise ModelError(
            f"{source} is not supported: its `tokenizer.ggml.pre` is {pre!r}, which is unknown, so tokens "
            "would be wrong.",
            "Give the model's original folder or hub id.",
        )
    local = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(source.parent, **local)
    admit(config)
    check_layout(outline(config))
    if pre in _WHOLE_WORDS and "tokenizer.ggml.add_bos_token" not in metadata:
        local["add_bos_token"] = True
    return pre, config, AutoTokenizer.from_pretrained(source.parent, **local)


def _read_network(source: Path, config: Any) -> Any:
    """Read the dequantized weights in float16, or in float32 if one of them overflows.

    Raises:
        ModelError: A tensor is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from kvedit.checkpoint.read import check_complete

    for dtype in (torch.float16, torch.float32):
        with contextlib.redirect_stderr(io.StringIO()):  # hide a progress bar that has no option
            network, loading_info = AutoModelForCausalLM.from_pretrained(
                source.parent,
                config=config,
                gguf_file=source.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        check_complete(loading_info, source)
        if all(bool(weights.isfinite().all()) for weights in network.parameters()):
            break
    return network


def _complete_tokenizer(path: Path, pre: str | None) -> None:
    """Add what transformers omits when it converts a byte-level tokenizer."""
    serialized = json.loads(path.read_text(encoding="utf-8"))
    if pre in _DIGITS_APART:
        digits = {"type": "Digits", "individual_digits": True}
        parts = [digits, serialized["pre_tokenizer"]]
        serialized["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    if pre in _WHOLE_WORDS:
        serialized["model"]["ignore_merges"] = True
    path.write_text(json.dumps(serialized, ensure_ascii=False), encoding="utf-8")
