"""Where a checkpoint comes from: folders, shards, the hub's cache, GGUF; and what never happens then."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from rigs.reference import load_session
from rigs.tiny import CORPUS, KINDS, save_tiny, tiny_config, tiny_tokenizer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kvedit.checkpoint.opening import open_model, open_stock
from kvedit.checkpoint.resolve import find, models_folder, resolve
from kvedit.cli.app import app
from kvedit.errors import ModelError, SessionError
from kvedit.model.decode import Sampler, decode_, prefill_question_
from kvedit.model.model import Model

STRINGS = [
    *("The fees are paid.", "  indent", "foo\n\n\nbar", "12345 67", "don't", "", " ", "\n", "a\tb", "Käufer"),
    *("日本", "🙂 ok", "<|im_end|>", "x<|im_start|>user\n", "def total(items):", "e-mail, by post"),
    *("alpha beta gamma", "4471", "codes\n12\n34", CORPUS[0]),
]
QUANTS = {
    "F16": gguf.GGMLQuantizationType.F16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of a Llama checkpoint."""
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def halves_to_neighbours(weights: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of queries and keys as llama.cpp turns them: neighbours are pairs."""
    rows = weights.reshape(heads, 2, -1, weights.shape[-1])
    return rows.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path, network: Any, quant: str = "F16", tied: bool = False, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write a Llama checkpoint as GGUF; give the weights that it then holds, in float16, by HF's names."""
    config, tokenizer = network.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    if pre := changes.get("pre", "gpt-2"):
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    for add, token in (
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_pad_token_id, 0),
    ):
        add(token)
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    if changes.get("template", True):
        writer.add_chat_template(tokenizer.chat_template)
    held: dict[str, torch.Tensor] = {}
    for name, weights in network.state_dict().items():
        if (tied and name == "lm_head.weight") or name == changes.get("without"):
            continue
        data = weights.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        turned = next((heads[part] for part in heads if part in name), None)
        stored = data if turned is None else halves_to_neighbours(data, turned)
        if data.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
            held[name] = weights.half()
            continue
        blocks = gguf.quants.quantize(np.ascontiguousarray(stored), QUANTS[quant])
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=QUANTS[quant])
        plain = gguf.quants.dequantize(gguf.quants.quantize(data, QUANTS[quant]), QUANTS[quant])
        held[name] = torch.from_numpy(plain).half()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def tiny_network(**changes: Any) -> Any:
    torch.manual_seed(3)
    return KINDS["llama"][1](tiny_config("llama", **changes)).eval()


def greedy(model: Model, count: int = 10) -> list[int]:
    prompt = model.layout(None)
    question = [*prompt.head_ids, *model.tokenizer.encode_text(CORPUS[1]).ids]
    question += prompt.question_ids(model.tokenizer, "What is the code?").tolist()
    cache = model.new_cache(len(question) + count)
    logits, _ = prefill_question_(model, cache, torch.tensor(question))
    return list(decode_(model, cache, logits, Sampler(0.0, 0), count, []))


def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture(autouse=True)
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted models go into the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("quant", "tied"), [("F16", False), ("Q8_0", True), ("Q4_0", False), ("Q4_1", True)])
def test_a_gguf_file_equals_its_safetensors_twin(
    quant: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/transformers/pull/35085: a random head; BOS lost; other ids."""
    no_network(monkeypatch)
    network = tiny_network(tie_word_embeddings=tied)
    held = write_gguf(tmp_path / "tiny.gguf", network, quant, tied)
    if tied:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
    network.load_state_dict({name: weights.float() for name, weights in held.items()})
    network.half().save_pretrained(tmp_path / "twin")
    tiny_tokenizer().save_pretrained(tmp_path / "twin")
    stock = open_stock(resolve(str(tmp_path / "tiny.gguf")), device="cpu")
    twin = open_stock(tmp_path / "twin", device="cpu")
    model, wanted = stock.model, twin.model
    stock.compare().check()
    for name, weights in twin.network.state_dict().items():
        torch.testing.assert_close(stock.network.state_dict()[name], weights, atol=1e-6, rtol=1e-3)
    for text in STRINGS:
        assert np.array_equal(model.tokenizer.encode_text(text).ids, wanted.tokenizer.encode_text(text).ids)
        assert model.tokenizer.encode_template(text) == wanted.tokenizer.encode_template(text)
    assert model.layout("Be brief.") == wanted.layout("Be brief.")
    assert model.stop_ids == wanted.stop_ids == {2}
    assert model.context_length == wanted.context_length
    assert greedy(model) == greedy(wanted)
    assert len(greedy(model)) > 3


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        ({}, False),
        ({"add_bos": False}, False),
        ({"add_bos": True}, True),
        ({"pre": "llama-bpe"}, True),  # as llama.cpp does it where the file does not say
        ({"pre": "llama-bpe", "add_bos": False}, False),
    ],
    ids=str,
)
def test_a_gguf_file_says_whether_a_text_begins_with_bos(
    tmp_path: Path, more: dict[str, Any], begins: bool
) -> None:
    """https://github.com/huggingface/transformers/pull/35715: the flag was lost."""
    write_gguf(tmp_path / "base.gguf", tiny_network(), template=False, **more)
    model = open_stock(resolve(str(tmp_path / "base.gguf")), device="cpu").model
    assert list(model.layout(None).head_ids).count(1) == begins
    assert (model.layout(None).head_ids[0] == 1) == begins


def test_a_gguf_file_splits_text_as_its_metadata_says(tmp_path: Path) -> None:
    """Its digits apart, or words whole that no merges lead to."""
    parts = {}
    for pre in ("gpt-2", "smollm", "llama-bpe"):
        write_gguf(tmp_path / f"{pre}.gguf", tiny_network(), pre=pre)
        folder = resolve(str(tmp_path / f"{pre}.gguf"))
        parts[pre] = json.loads((folder / "tokenizer.json").read_text())
    assert [bool(part["model"].get("ignore_merges")) for part in parts.values()] == [False, False, True]
    digits = {"type": "Digits", "individual_digits": True}
    assert [digits in part["pre_tokenizer"].get("pretokenizers", []) for part in parts.values()] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "no-such-arch"}, "no-such-arch"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre.*'deepseek-llm'"),
        ({"pre": None}, "tokenizer.ggml.pre.*None"),
        ({"without": "model.layers.1.mlp.up_proj.weight"}, "1 tensors are missing.*layers.1.mlp.up_proj"),
    ],
    ids=["arch", "split", "no split", "tensor"],
)
def test_an_unsupported_gguf_file_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_gguf(tmp_path / "odd.gguf", tiny_network(), **changes)
    with pytest.raises(ModelError, match=said) as refused:
        resolve(str(tmp_path / "odd.gguf"))
    assert "\n" not in refused.value.fact
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("keep", ["all but a byte", "half", 100, 4, 0])
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(tmp_path: Path, keep: int | str) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, tiny_network(), "Q8_0")
    size = path.stat().st_size
    os.truncate(path, {"all but a byte": size - 1, "half": size // 2}.get(str(keep), keep))  # type: ignore[call-overload]
    result = CliRunner().invoke(app, ["models", "pull", str(path)])
    assert result.exit_code == 4, result.output
    assert "cannot be converted" in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output
    assert find(str(path)) is None
    assert not models_folder().is_dir() or not os.listdir(models_folder())


def test_a_gguf_file_may_have_any_name_beside_another_model(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "Modèles 日本", "qwen3")  # whose configuration and tokenizer are not its
    write_gguf(folder / "Kleinmodell – über.GGUF", tiny_network())
    stock = open_stock(resolve(str(folder / "Kleinmodell – über.GGUF")), device="cpu")
    assert stock.network.config.model_type == "llama"
    assert greedy(stock.model)


def test_gguf_files_with_equal_beginnings_are_two_models(tmp_path: Path) -> None:
    paths = [tmp_path / name / "same.gguf" for name in ("one", "other")]
    for path in paths:
        path.parent.mkdir()
        network = tiny_network(vocab_size=20000)  # more than 1 MiB before what differs
        if path.parent.name == "other":
            network.lm_head.weight.data.mul_(1.5)
            network.model.norm.weight.data.mul_(1.5)
        write_gguf(path, network)
    one, other = (path.read_bytes() for path in paths)
    assert len(one) == len(other)
    assert one[: 1 << 20] == other[: 1 << 20]
    assert resolve(str(paths[0])) != resolve(str(paths[1]))


def test_weights_too_large_for_float16_are_kept_in_float32(tmp_path: Path) -> None:
    network = tiny_network()
    network.model.norm.weight.data.fill_(1e5)
    write_gguf(tmp_path / "large.gguf", network)
    stock = open_stock(resolve(str(tmp_path / "large.gguf")), device="cpu")
    assert torch.equal(stock.network.model.norm.weight, torch.full((64,), 1e5))


def test_shards_are_read_as_one_model(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    sharded = shutil.copytree(checkpoints["llama"], tmp_path / "sharded")
    whole = open_stock(checkpoints["llama"], device="cpu")
    (sharded / "model.safetensors").unlink()
    whole.network.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert greedy(open_stock(sharded, device="cpu").model) == greedy(whole.model)


@pytest.mark.parametrize("keep", ["all but a byte", "half", 4, 0, "none"])
def test_a_damaged_shard_is_refused_by_load(
    tmp_path: Path, home: Path, checkpoints: dict[str, Path], keep: int | str
) -> None:
    """https://github.com/lyogavin/airllm/issues/137: missing tails read as zeros."""
    sharded = shutil.copytree(checkpoints["llama"], tmp_path / "sharded")
    network = open_stock(sharded, device="cpu").network
    (sharded / "model.safetensors").unlink()
    network.save_pretrained(sharded, max_shard_size="100KB")
    shard = sorted(sharded.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    if keep == "none":
        shard.unlink()
    else:
        os.truncate(shard, {"all but a byte": size - 1, "half": size // 2}.get(str(keep), keep))  # type: ignore[call-overload]
    Path("text.txt").write_text("The fees are paid.\n")
    result = CliRunner().invoke(app, ["load", "text.txt", "-m", str(sharded)])
    assert result.exit_code == 4, result.output
    assert "cannot be read" in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not list(home.glob("*"))


@pytest.mark.parametrize("lost", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_weights_that_lack_a_tensor_are_refused(
    tmp_path: Path, checkpoints: dict[str, Path], lost: str
) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"1 tensors are missing, such as `{lost}`"):
        open_stock(folder, device="cpu")


def test_tied_embeddings_need_no_second_copy_in_the_file(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    stock = open_stock(folder, device="cpu")
    stock.compare().check()
    assert stock.model.tied
    assert stock.network.lm_head.weight is stock.network.model.embed_tokens.weight


def test_a_bfloat16_checkpoint_is_cast_by_the_rule_or_as_asked(tmp_path: Path, home: Path) -> None:
    """https://github.com/huggingface/transformers/issues/34692: 16 bits are slow on many CPUs."""
    folder = save_tiny(tmp_path / "brain", "llama")
    open_stock(folder, device="cpu", dtype="bfloat16").network.save_pretrained(folder)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert open_model(folder, device="cpu").dtype_name == "float32"  # the rule on a CPU
    half = open_model(folder, device="cpu", dtype="bfloat16")
    assert half.dtype_name == "bfloat16"
    session = load_session(home, half, CORPUS[0])
    assert session.status().dtype == "bfloat16"
    segment = session._state.store.read_segment(session.rows.segments[0])
    assert segment["keys"].dtype == torch.bfloat16
    assert (
        session._state.find_model(str(folder)).dtype_name == "bfloat16"
    )  # a question opens it as the load did


def test_pickles_are_refused_by_their_reason(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickle files, which can run code"):
        open_stock(folder, device="cpu")
    with pytest.raises(ModelError, match="pickle, which can run code"):
        resolve(str(folder / "pytorch_model.bin"))
    save_file({"adapter": torch.zeros(2)}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot be read"):  # nor read beside a file of another kind
        open_stock(folder, device="cpu")


@pytest.mark.parametrize("known", [True, False])
def test_code_that_comes_with_a_model_is_never_run(
    tmp_path: Path, home: Path, checkpoints: dict[str, Path], known: bool
) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "malicious")
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
        "AutoTokenizer": ["tokenization_evil.EvilTokenizer", "tokenization_evil.EvilTokenizer"],
    }
    if not known:
        config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": config["auto_map"]["AutoTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    Path("text.txt").write_text("The fees are paid.\n")
    # With "y" on standard input, since transformers asks there whether to run it.
    result = CliRunner().invoke(app, ["load", "text.txt", "-m", str(folder)], input="y\ny\ny\n")
    assert result.exit_code == (0 if known else 4), result.output
    assert "Traceback" not in result.output
    assert "[y/N]" not in result.output
    assert not (tmp_path / "executed").exists()


def test_a_local_model_needs_no_network_for_anything(
    home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/huggingface/transformers/issues/45545: the hub was asked although all is local."""
    no_network(monkeypatch)
    Path("text.txt").write_text("The fees are paid.\nThe code is 4471.\n")
    for args in (
        ["load", "text.txt", "-m", str(checkpoints["llama"])],
        ["delete", "--lines", "1"],
        ["ask", "What is the code?", "--max-new-tokens", "2"],
        ["models", "list"],
        ["models", "pull", str(checkpoints["llama"])],
    ):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    no_network(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def in_cache(hub: Path, name: str, folder: Path) -> Path:
    """Put a model into a hub's cache, as the hub's library lays it out."""
    repository = hub / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_cached_hub_id_is_used_offline(hub: Path, home: Path, checkpoints: dict[str, Path]) -> None:
    snapshot = in_cache(hub, "someone/tiny-llama", checkpoints["llama"])
    assert find("someone/tiny-llama") == snapshot
    Path("text.txt").write_text("The fees are paid.\n")
    result = CliRunner().invoke(app, ["load", "text.txt", "-m", "someone/tiny-llama"])
    assert result.exit_code == 0, result.output


def test_an_uncached_hub_id_says_what_to_download_and_how(hub: Path, home: Path) -> None:
    Path("text.txt").write_text("The fees are paid.\n")
    result = CliRunner().invoke(app, ["load", "text.txt", "-m", "someone/elsewhere"])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 4, result.output
    assert "someone/elsewhere is not in the hub's cache" in said
    assert "HF_HUB_OFFLINE is set" in said
    assert "kvedit models pull someone/elsewhere" in said
    assert "Traceback" not in result.output


def test_an_interrupted_download_is_not_a_cached_model(
    hub: Path, tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    sharded = shutil.copytree(checkpoints["llama"], tmp_path / "sharded")
    network = open_stock(sharded, device="cpu").network
    (sharded / "model.safetensors").unlink()
    network.save_pretrained(sharded, max_shard_size="100KB")
    snapshot = in_cache(hub, "someone/sharded", sharded)
    assert find("someone/sharded") == snapshot
    sorted(snapshot.glob("*.safetensors"))[-1].unlink()
    assert find("someone/sharded") is None
    with pytest.raises(ModelError, match="hub's cache lacks weights"):
        resolve("someone/sharded")


def test_a_session_accepts_its_moved_model_but_no_other(
    home: Path, tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """https://github.com/ml-explore/mlx-lm/pull/1405: a cache was tied to the name of a model only."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "first")
    load_session(home, open_model(folder, device="cpu"), CORPUS[0])
    moved = folder.rename(tmp_path / "moved")

    def asked(model: Path) -> Any:
        return CliRunner().invoke(app, ["ask", "When?", "--max-new-tokens", "1", "--model", str(model)])

    assert asked(moved).exit_code == 0
    for part, change in {
        "weights": lambda at: save_tiny(at, "llama", seed=9),
        "tensor samples": one_row_changed,
        "tokenizer": lambda at: rewritten(
            at / "tokenizer.json", '"normalizer": null', '"normalizer": {"type":"NFC"}'
        ),
        "chat template": lambda at: rewritten(at / "chat_template.jinja", "assistant", "helper"),
        "config": lambda at: rewritten(at / "config.json", '"rope_theta": 10000.0', '"rope_theta": 20000.0'),
    }.items():
        other = shutil.copytree(moved, tmp_path / f"other {part}")
        change(other)
        result = asked(other)
        said = " ".join(result.stderr.split())
        assert result.exit_code == SessionError.exit_code == 3, (part, result.output)
        assert f"the {part} {'differ' if part == 'weights' else 'differs'}" in said, (part, said)
    assert asked(moved).exit_code == 0


def rewritten(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def one_row_changed(folder: Path) -> None:
    """Change a tensor in the middle of a layer: the file keeps its size, and its ends and its middle."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0] += 0.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
