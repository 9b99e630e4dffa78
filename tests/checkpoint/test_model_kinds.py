"""Kinds of models: what is refused before any weights are read, and how answers begin and end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.reference import load_session, prefill_states, stock_greedy
from rigs.tiny import DEFAULT, LLAMA3, YARN, part_of, save_tiny, tiny_config, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AriaTextConfig,
    BartConfig,
    BitNetConfig,
    BloomConfig,
    DeepseekV3Config,
    Dots3NoteTextConfig,
    Ernie4_5Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    HeliumConfig,
    JambaConfig,
    MambaConfig,
    Ministral3Config,
    MixtralConfig,
    MptConfig,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    RwkvConfig,
    SmolLM3Config,
    StableLmConfig,
    T5Config,
    ZambaConfig,
)
from typer.testing import CliRunner

from kvedit.cache.kv import KVCache
from kvedit.checkpoint.opening import open_stock
from kvedit.cli.app import app
from kvedit.errors import ModelError
from kvedit.model.model import Model
from kvedit.repair.budget import Budget
from kvedit.text.document import LineRange

MROPE = {**DEFAULT, "mrope_section": [2, 3, 3]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0] * 8}
LONG |= {"long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
SCALED = {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a sliding window": (lambda: tiny_config("mistral", sliding_window=16), "sliding_window"),
    "full and windowed layers": (
        lambda: tiny_config("qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=1),
        "layer_types",
    ),
    "Gemma 3": (lambda: Gemma3TextConfig(**SMALL), "layer_types"),
    "a mixture of experts": (lambda: MixtralConfig(**SMALL), "num_local_experts"),
    "Qwen 3's mixture": (lambda: Qwen3MoeConfig(**SMALL), "num_local_experts"),
    "ALiBi in MPT": (lambda: MptConfig(), "rope_parameters"),
    "ALiBi in BLOOM": (lambda: BloomConfig(), "rope_parameters"),
    "ALiBi in Falcon": (lambda: FalconConfig(alibi=True), "alibi"),
    "learned positions in GPT-2": (lambda: GPT2Config(), "rope_parameters"),
    "learned positions in OPT": (lambda: OPTConfig(), "rope_parameters"),
    "another attention in each layer": (lambda: Dots3NoteTextConfig(), "kv_lora_rank"),
    "a mixture by another name": (lambda: AriaTextConfig(), "moe_num_experts"),
    "latent attention": (lambda: DeepseekV3Config(), "kv_lora_rank"),
    "Mamba": (lambda: MambaConfig(**SMALL), "state_size|layer_types"),
    "Jamba": (lambda: JambaConfig(num_experts=1), "mamba_d_state"),
    "Zamba": (lambda: ZambaConfig(), "mamba_d_state|layer_types"),
    "RWKV": (lambda: RwkvConfig(), "rope_parameters"),
    "images, M-RoPE": (lambda: Qwen2VLConfig(), "vision_config|text_config"),
    "M-RoPE in text": (lambda: tiny_config("qwen2", rope_parameters=MROPE), "mrope_section"),
    "dynamic frequencies": (lambda: tiny_config("llama", rope_parameters=DYNAMIC), "rope_type.*dynamic"),
    "long frequencies": (lambda: tiny_config("llama", rope_parameters=LONG), "rope_type.*longrope"),
    "queries scaled by position": (
        lambda: Ministral3Config(**SMALL, rope_parameters=SCALED),
        "llama_4_scaling_beta",
    ),
    "layers without RoPE": (lambda: SmolLM3Config(), "no_rope_layers"),
    "an encoder, T5": (lambda: T5Config(), "is_encoder_decoder"),
    "an encoder, BART": (lambda: BartConfig(), "is_encoder_decoder"),
    "capped scores": (lambda: Gemma2Config(**SMALL), "softcapping"),
    "clipped projections": (lambda: OlmoConfig(**SMALL, clip_qkv=8.0), "clip_qkv"),
    "quantised weights": (lambda: tiny_config("llama", quantization_config=GPTQ), "quantization_config"),
    "fused projections": (lambda: Phi3Config(**SMALL), "self_attn.q_proj"),
    "neighbours turn, in part": (lambda: GlmConfig(**SMALL), "partial_rotary_factor"),
    "neighbours turn": (lambda: Ernie4_5Config(**SMALL), "rope_parameters"),
    "neighbours turn, in Helium": (lambda: HeliumConfig(**SMALL, head_dim=16), "rope_parameters"),
    "norms after attention": (lambda: Glm4Config(**SMALL), "post_self_attn_layernorm"),
    "norms within attention": (lambda: BitNetConfig(**SMALL), "attn_sub_norm"),
    "a parallel residual": (
        lambda: StableLmConfig(**SMALL, use_parallel_residual=True),
        "post_attention_layernorm",
    ),
    "norms by another name": (lambda: StableLmConfig(**SMALL, qk_layernorm=True), "q_layernorm"),
    "a part that its code ignores": (
        lambda: tiny_config("llama", rope_parameters=part_of(0.5)),
        "partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_load_refuses_by_the_field_and_reads_no_weights(home: Path, tmp_path: Path, kind: str) -> None:
    """https://github.com/LMCache/LMCache/issues/4666: models that cannot be repaired came out garbled."""
    config, field = REFUSED[kind]
    folder = tmp_path / "model"
    folder.mkdir()
    config().to_json_file(folder / "config.json")
    (folder / "model.safetensors").write_bytes(b"whoever reads this fails in another way")
    Path("text.txt").write_text("The fees are paid.\n")
    result = CliRunner().invoke(app, ["load", "text.txt", "-m", str(folder)])
    assert result.exit_code == 4, result.output
    assert "Traceback" not in result.output
    with pytest.raises(ModelError, match=field) as refused:
        open_stock(folder, device="cpu")
    assert "not supported" in refused.value.fact
    assert "\n" not in refused.value.fact
    assert " ".join(refused.value.fact.split()) in " ".join(result.stderr.split())
    assert not list(home.glob("*"))


@pytest.mark.parametrize(
    "written",
    [
        "",
        "not JSON",
        "[]",
        "{}",
        '{"model_type": "nobody-knows"}',
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "rope_parameters": 7}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7, "num_hidden_layers": 1}',
        '{"model_type": "llama", "rope_parameters": {"rope_type": "spiral"}}',
        b"\xff\xfe\x00",
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_configuration_that_makes_no_sense_is_one_sentence(
    home: Path, tmp_path: Path, written: str | bytes
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(written if isinstance(written, bytes) else written.encode())
    Path("text.txt").write_text("The fees are paid.\n")
    result = CliRunner().invoke(app, ["load", "text.txt", "-m", str(folder)])
    assert result.exit_code == 4, result.output
    assert "Traceback" not in result.output
    assert len(re.findall(r"^Error: ", result.stderr, re.MULTILINE)) == 1


def test_what_depends_on_the_position_far_away_is_found(checkpoints: dict[str, Path]) -> None:
    """A short probe at the start of the context would see nothing."""
    stock = open_stock(checkpoints["llama"], device="cpu")
    stock.compare().check()
    rotary = stock.network.model.rotary_emb
    forward = rotary.forward

    def scaled(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        factor = 1.0 + 0.5 * (position_ids > 500)[..., None].float()
        cos, sin = forward(states, position_ids)
        return cos * factor, sin * factor

    rotary.forward = scaled
    with pytest.raises(ModelError, match="something other than RoPE depends on the position"):
        stock.compare().check()


def test_keys_that_are_turned_in_another_way_are_found(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = open_stock(checkpoints["llama"], device="cpu")
    # All rows stand five further on: every score, and so the forward pass, is the same; the keys are not.
    turned = stock.model.rope.angles
    monkeypatch.setattr(type(stock.model.rope), "angles", lambda rope, at, dtype: turned(at + 5, dtype))
    with pytest.raises(ModelError, match="rotates keys differently"):
        stock.compare().check()


def test_a_part_that_the_code_of_a_model_cannot_turn_is_refused(tmp_path: Path) -> None:
    rope = {**YARN, "partial_rotary_factor": 0.5}  # which its own forward pass fails on
    stock = open_stock(save_tiny(tmp_path / "model", "llama", rope_parameters=rope), device="cpu")
    with pytest.raises(ModelError, match="cannot be run by kvedit"):
        stock.compare()


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_a_window_that_is_not_used_bounds_nothing(tmp_path: Path, home: Path, length: int) -> None:
    """https://github.com/huggingface/transformers/issues/37574: wrong exactly when the window was full."""
    config = tiny_config("qwen2", sliding_window=16, use_sliding_window=False, max_window_layers=1)
    assert isinstance(config, Qwen2Config)
    folder = save_tiny(
        tmp_path / "m", "qwen2", sliding_window=16, use_sliding_window=False, max_window_layers=1
    )
    model = open_stock(folder, device="cpu").model
    own, stock, own_ids, stock_ids = stock_greedy(model, np.arange(length) * 7 % 500, 6)
    torch.testing.assert_close(own, stock, atol=2e-4, rtol=2e-4)
    assert own_ids == stock_ids


@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 6), slice(2, 3), torch.tensor([1, 5]), slice(28, 33)])
def test_ids_and_rows_of_other_lengths_raise(llama: Model, rows: slice | torch.Tensor) -> None:
    """https://github.com/huggingface/transformers/pull/47597: a mask of another length was taken silently."""
    cache = llama.new_cache(32)
    before = cache.keys.clone()
    for ids in (torch.arange(5), torch.arange(1)):
        if isinstance(rows, slice) and rows.stop - rows.start == len(ids) and rows.stop <= 32:
            continue
        with pytest.raises(ValueError, match="rows"):
            llama.walk(ids, rows, cache)
    assert torch.equal(cache.keys, before)
    assert cache.length == 0


def test_every_layer_holds_the_same_rows_after_each_edit(llama: Model, home: Path) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/1494: one layer was trimmed, another was not."""
    session = load_session(home, llama, "".join(f"Line {number} has fees.\n" for number in range(30)))
    for lines in ("28-30", "1-2", "10"):
        session.delete(lines)
        session.ask("When?", budget=Budget.full(), max_new_tokens=2)
        cache, total = session._state.working.cache, len(session.rows)
        assert isinstance(cache, KVCache)
        clean = prefill_states(llama, session._state.ids)
        assert clean.values.shape[:3] == (llama.layers, llama.heads, total)
        for layer in range(llama.layers):
            torch.testing.assert_close(
                cache.values[layer, :, :total], clean.values[layer], atol=1e-4, rtol=1e-4
            )


LLAMA3_TEMPLATE = (
    "{% for m in messages %}"
    "{% set text = '<|im_start|>' + m['role'] + '\n\n' + m['content'] + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN_TEMPLATE = None


@pytest.mark.parametrize(
    ("template", "adds"),
    [
        (LLAMA3_TEMPLATE, True),
        (GEMMA_TEMPLATE, True),
        (MISTRAL_TEMPLATE, True),
        (LLAMA3_TEMPLATE, False),
        (PLAIN_TEMPLATE, True),
        (PLAIN_TEMPLATE, False),
    ],
    ids=["Llama 3", "Gemma", "Mistral", "template alone", "base model", "base model without"],
)
def test_a_prompt_has_one_bos_at_its_start_and_none_elsewhere(
    template: str | None, adds: bool, tmp_path: Path, home: Path
) -> None:
    """https://github.com/vllm-project/vllm/pull/27515: the template wrote one, and the tokenizer another."""
    folder = save_tiny(tmp_path / "model", "llama", bos_token_id=0)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    if adds:
        added = [("<|endoftext|>", 0)]
        processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=added)
        tokenizer.backend_tokenizer.post_processor = processor
    (folder / "chat_template.jinja").unlink()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    model = open_stock(folder, device="cpu").model
    session = load_session(home, model, "The <|endoftext|> fees.\n<|im_end|>\nThe end.\n")
    question = session._state.prompt.question_ids(session._state.tokenizer, "When <|im_end|>?").tolist()
    following = session._state.prompt.question_ids(session._state.tokenizer, "And?", next_turn=True).tolist()
    whole = [*session._state.ids.tolist(), *question]
    expected = 1 if adds or template is not None else 0
    assert whole.count(0) == expected
    assert (whole[0] == 0) == bool(expected)
    assert 0 not in following
    body = session._state.tokens.ids.tolist()
    assert not {0, 1, 2} & set(body)  # the document's are text
    if template is not None:  # and the parts make what the template makes of the whole
        text = session.document.text.replace("<|endoftext|>", "X").replace("<|im_end|>", "Y")
        user = f"Answer the question from this text.\n\n{text}\n\nQuestion: When?"
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
        )
        parts = session._state.prompt
        head = tokenizer.decode(list(parts.head_ids))
        assert f"{head}{text}{parts.before_question}When?{parts.after_question}" == rendered


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_an_answer_ends_at_any_of_a_list_of_ends(
    where: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path / "model", "llama-llama3")
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "llama3"
    assert LLAMA3["rope_type"] == "llama3"
    named = json.loads((folder / where).read_text()) | {"eos_token_id": [300, 301]}
    (folder / where).write_text(json.dumps(named))
    model = open_stock(folder, device="cpu").model
    assert model.stop_ids == {2, 300, 301}  # the tokenizer's own, too
    session = load_session(home, model, "The fees are paid.\nThe end.\n")
    session.delete(LineRange(2, 2))
    for end in sorted(model.stop_ids):
        spoken = iter([40, 41, end, 42])
        monkeypatch.setattr("kvedit.model.decode.Sampler.__call__", lambda *_, spoken=spoken: next(spoken))
        answer = session.ask("When?", max_new_tokens=8, keep=False)
        assert answer.ids == (40, 41)
        assert answer.finish_reason == "stop"
