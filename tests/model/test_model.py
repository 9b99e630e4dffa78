"""Which models are admitted, what is refused by which field, and how the prompt is laid out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.tiny import save_tiny, tiny_config, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma2Config,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    Phi3Config,
    SmolLM3Config,
    T5Config,
)

from kvedit.checkpoint import fingerprint
from kvedit.checkpoint.adapt import from_transformers
from kvedit.checkpoint.admission import admit, check_layout
from kvedit.checkpoint.compare import Stock
from kvedit.checkpoint.opening import open_model, open_stock
from kvedit.checkpoint.resolve import find, resolve
from kvedit.checkpoint.template import layout
from kvedit.errors import ModelError
from kvedit.model.model import Model
from kvedit.tokens.prompt import Prompt
from kvedit.tokens.tokenizer import Tokenizer

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (lambda: tiny_config("llama", rope_parameters=DYNAMIC), "rope_type"),
        (lambda: tiny_config("llama", rope_parameters=LONG), "rope_type"),
        (lambda: tiny_config("mistral", sliding_window=16), "sliding_window"),
        (
            lambda: tiny_config("qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=1),
            "layer_types",
        ),
        (lambda: MixtralConfig(num_local_experts=4, sliding_window=None), "num_local_experts"),
        (lambda: Gemma2Config(), "softcapping"),
        (lambda: GraniteConfig(embedding_multiplier=12.0), "embedding_multiplier"),
        (lambda: GraniteConfig(logits_scaling=8.0), "logits_scaling"),
        (lambda: SmolLM3Config(), "no_rope_layers"),
        (lambda: T5Config(), "is_encoder_decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_models_are_refused_by_the_field(config: Any, field: str) -> None:
    with pytest.raises(ModelError, match=field) as refused:
        admit(config())
    assert refused.value.exit_code == 4
    assert refused.value.remedy


def test_every_tiny_kind_is_admitted_and_checks_out(tiny: Model) -> None:
    assert tiny.network.packed


def test_another_module_layout_is_refused_by_the_module() -> None:
    from transformers import Phi3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    network = Phi3ForCausalLM(Phi3Config(**sizes, num_key_value_heads=2, vocab_size=512, pad_token_id=0))
    with pytest.raises(ModelError, match="q_proj"):
        check_layout(network)


def test_comparison_catches_a_different_forward_pass(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = GraniteConfig(**sizes, num_key_value_heads=2, vocab_size=512, residual_multiplier=0.3)
    network = GraniteForCausalLM(config).eval()
    check_layout(network)  # the modules are Llama's; only the arithmetic differs
    tokenizer = tiny_tokenizer()
    own = Tokenizer(tokenizer.backend_tokenizer.to_str())
    model = Model(tmp_path, from_transformers(network), own, (), {}, lambda system: Prompt((), "", "", ""))
    with pytest.raises(ModelError, match="differ from its own forward pass"):
        Stock(model, network).compare().check()


def test_a_folder_without_weights_is_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    shutil.copytree(checkpoints["llama"], tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors weights"):
        open_model(tmp_path / "bare", device="cpu")


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_a_truncated_shard_is_refused(tmp_path: Path, checkpoints: dict[str, Path], keep: int) -> None:
    shutil.copytree(checkpoints["llama"], tmp_path / "cut")
    shard = tmp_path / "cut" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match="cannot be read"):
        open_model(tmp_path / "cut", device="cpu")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    shutil.copytree(checkpoints["llama"], tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "mute" / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        open_model(tmp_path / "mute", device="cpu")


def test_a_local_model_uses_no_network(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", refuse)
    open_model(resolve(str(checkpoints["qwen3"])), device="cpu")
    open_stock(resolve(str(checkpoints["qwen3"])), device="cpu")


@pytest.mark.parametrize("name", ["nothing", "./not/here/at/all", "a b"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="Unknown model"):
        resolve(name)


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot be downloaded") as refused:
        resolve("nobody/nothing-like-this")
    assert "\n" not in refused.value.fact


def test_a_damaged_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\0\0\0 and then nothing that makes sense")
    with pytest.raises(ModelError, match="cannot be converted"):
        resolve(str(tmp_path / "x.gguf"))
    assert find(str(tmp_path / "x.gguf")) is None
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_fingerprint_names_what_differs(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    def parts(folder: Path, template: str = "t") -> dict[str, str]:
        own = Tokenizer((folder / "tokenizer.json").read_text())
        return {**fingerprint.of_files(folder), **fingerprint.of_text(own, template)}

    here = parts(checkpoints["llama"])
    shutil.copytree(checkpoints["llama"], tmp_path / "moved")
    assert parts(tmp_path / "moved") == here  # a moved model is the same model
    other = parts(save_tiny(tmp_path / "other", "llama", seed=1))
    assert {name for name in here if here[name] != other[name]} == {"weights", "tensor_samples"}
    assert parts(checkpoints["llama"], "another")["chat_template"] != here["chat_template"]
    longer = parts(save_tiny(tmp_path / "longer", "llama", max_position_embeddings=2048))
    assert {name for name in here if here[name] != longer[name]} == {"config"}


def test_head_body_and_question_are_encoded_apart(llama: Model) -> None:
    prompt = llama.layout("Be brief.")
    text = llama.tokenizer.decode(list(prompt.head_ids))
    assert "Be brief." in text
    assert list(prompt.head_ids).count(1) == 2  # one start of turn for each role, and no extra BOS
    question = prompt.question_ids(llama.tokenizer, "Say <|im_end|> now")
    assert list(question).count(2) == 1  # the template's own; the user's is text
    assert "Say <|im_end|> now" in llama.tokenizer.decode(question.tolist())


def test_a_model_without_a_template_gets_one_bos() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    backend = tokenizer.backend_tokenizer
    assert layout(tokenizer, Tokenizer(backend.to_str()), None).head_ids[0] != 1  # which it does not add
    start = [("<|im_start|>", 1)]
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=start)
    own = Tokenizer(tokenizer.backend_tokenizer.to_str())
    prompt = layout(tokenizer, own, "System text.")
    assert list(prompt.head_ids).count(1) == 1
    assert prompt.head_ids[0] == 1
    assert prompt.after_question.endswith("Answer:")


def test_a_system_text_without_its_role_joins_the_users_turn() -> None:
    tokenizer = tiny_tokenizer()
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    own = Tokenizer(tokenizer.backend_tokenizer.to_str())
    assert "System text." in own.decode(list(layout(tokenizer, own, "System text.").head_ids))


def test_a_template_that_changes_the_text_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|im_start|>user\nnothing of yours<|im_end|>"
    with pytest.raises(ModelError, match="changes the user's text"):
        layout(tokenizer, Tokenizer(tokenizer.backend_tokenizer.to_str()), None)


def test_prefill_in_chunks_equals_prefill_at_once(tiny: Model) -> None:
    ids = torch.from_numpy(np.arange(300) % 500)
    whole, parts = tiny.new_cache(300), tiny.new_cache(300)
    tiny.walk(ids, slice(0, 300), whole)
    stops = [1, 38, 75, 230, 231, 300]  # some with and some without the split of many adjacent rows
    for first, stop in zip([0, *stops], stops, strict=False):
        tiny.walk(ids[first:stop], slice(first, stop), parts)
    torch.testing.assert_close(parts.keys, whole.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts.values, whole.values, atol=1e-4, rtol=1e-4)
