"""Convert a GGUF checkpoint once into a folder of safetensors, float16.

Loads transformers only when a file is converted.
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
from kvedit.files import make_folder, writing

# transformers gives every byte-level GGUF tokenizer the same split; SmolLM's also parts digits
# (llama.cpp, llama-vocab: "smollm"), without which blank lines before digits encode otherwise.
_DIGITS_APART = frozenset({"smollm"})


def convert_gguf(source: Path, target: Path) -> None:
    """Convert `source` into the folder `target`, which appears whole or not at all.

    Raises:
        ModelError: The file is damaged, or of an architecture that transformers cannot read.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    make_folder(target.parent)
    with writing(target):
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bar cannot be turned off
                network: Any = AutoModelForCausalLM.from_pretrained(
                    source.parent,
                    gguf_file=source.name,
                    dtype=torch.float16,
                    quantization_config=GgufConfig(dequantize=True),
                )
        except Exception as error:
            # The GGUF reader raises whatever the damaged bytes lead it to.
            raise ModelError(
                f"{source} cannot be converted ({type(error).__name__}: {str(error).splitlines()[:1]}).",
                "Check that the download is complete, or name the model's original folder.",
            ) from None
        with writing(target):
            network.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            _part_digits(source, partial / "tokenizer.json")
            partial.chmod(0o755)
            if target.exists():  # another process was first
                return
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _part_digits(source: Path, tokenizer: Path) -> None:
    """Split digits apart where the GGUF names a pre-tokenizer that does."""
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() not in _DIGITS_APART:
        return
    serialized = json.loads(tokenizer.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    serialized["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, serialized["pre_tokenizer"]]}
    tokenizer.write_text(json.dumps(serialized, ensure_ascii=False), encoding="utf-8")
