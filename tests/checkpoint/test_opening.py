"""Checkpoints that are opened again without transformers: the same model, or the long way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rigs.tiny import KINDS, save_tiny
from safetensors.torch import load_file, save_file

from kvedit.checkpoint import compare, read, recipe
from kvedit.checkpoint.assemble import assemble
from kvedit.checkpoint.opening import admit, open_model, open_stock
from kvedit.errors import ModelError
from kvedit.model.model import Model
from kvedit.model.network import Gated, Linear, RmsNorm
from kvedit.model.packed import Packed
from kvedit.repair.refresh import prefill_
from kvedit.tokens.prompt import Prompt

IDS = torch.arange(60) * 11 % 500


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint of the test's own, and recipes of its own."""
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path / "recipes")
    shutil.copytree(checkpoints["llama"], tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that transformers has read."""
    folders: list[Path] = []
    plain = read.read_network
    monkeypatch.setattr(
        read, "read_network", lambda folder, *args: folders.append(folder) or plain(folder, *args)
    )
    return folders


def is_plain(model: Model) -> bool:
    return not isinstance(model.network.norm, torch.nn.Module)


def read_again(folder: Path, reads: list[Path], dtype: str = "auto") -> bool:
    """Open a checkpoint; report whether transformers read it."""
    before = len(reads)
    open_model(folder, device="cpu", dtype=dtype)
    return len(reads) > before


def logits_of(model: Model, ids: torch.Tensor = IDS) -> torch.Tensor:
    count = len(ids)
    return model.logits(model.walk(ids, slice(0, count), model.new_cache(count), outputs=count).hidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_checked_model_opens_as_equal_plain_parts(
    kind: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path)
    monkeypatch.setattr(Packed, "can_hold", lambda weight: False)
    stock = open_stock(checkpoints[kind], device="cpu", dtype=dtype).model
    model = open_model(checkpoints[kind], device="cpu", dtype=dtype)
    assert is_plain(model)
    assert not is_plain(stock)
    logits = []
    for one in (stock, model):
        cache = one.new_cache(len(IDS))
        for _ in prefill_(one, cache, IDS[:40]):
            pass
        logits.append(one.logits(one.walk(IDS[40:], slice(40, 60), cache, outputs=20).hidden))
        logits += [cache.keys, cache.values]
    assert all(map(torch.equal, logits[:3], logits[3:]))
    assert model.network.sizes == stock.network.sizes
    for name in ("parts", "stop_ids", "layers", "heads", "groups", "width", "scaling", "context_length"):
        assert getattr(model, name) == getattr(stock, name)
    assert model.tokenizer.serialized == stock.tokenizer.serialized
    assert model.layout("Be brief.") == stock.layout("Be brief.")


@pytest.mark.parametrize("biases", ["none", "all", "some"])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_packed_layers_are_the_layers_side_by_side(biases: str, rows: int) -> None:
    chance = torch.Generator().manual_seed(rows)
    with_bias = {"none": (), "all": (48, 16, 7), "some": (16,)}[biases]
    layers = [
        Linear(
            torch.randn(size, 40, generator=chance),
            torch.randn(size, generator=chance) if size in with_bias else None,
        )
        for size in (48, 16, 7)
    ]
    states = torch.randn(rows, 40, generator=chance)
    assert Packed.can_hold(layers[0].weight)
    packed = Packed(*layers)
    slowly = torch.cat(
        [states @ layer.weight.T + (0 if layer.bias is None else layer.bias) for layer in layers], 1
    )
    torch.testing.assert_close(packed(states), slowly, atol=1e-5, rtol=1e-5)


def test_only_float32_on_a_cpu_is_packed(folder: Path) -> None:
    assert open_model(folder, device="cpu").network.packed
    assert not open_model(folder, device="cpu", dtype="bfloat16").network.packed


def test_an_admitted_checkpoint_opens_as_plain_parts_at_once(folder: Path) -> None:
    stock = open_stock(folder, device="cpu")
    model = admit(stock)
    assert is_plain(model)
    assert model.parts == stock.model.parts
    torch.testing.assert_close(logits_of(model), logits_of(stock.model), atol=1e-4, rtol=1e-4)


def test_packed_layers_that_give_other_numbers_make_no_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Packed.__call__
    monkeypatch.setattr(Packed, "__call__", lambda self, states: 1.1 * call(self, states))
    stock = open_stock(folder, device="cpu")
    assert admit(stock) is stock.model


def test_a_refused_recipe_is_not_compared_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = []
    monkeypatch.setattr(compare, "_same", lambda model, plain: bool(comparisons.append(plain)))
    for _ in range(2):
        open_model(folder, device="cpu")
    assert len(comparisons) == 1
    edit_config(folder)
    open_model(folder, device="cpu")
    assert len(comparisons) == 2
    open_model(folder, device="cpu", dtype="bfloat16")
    assert len(comparisons) == 3


def test_the_version_of_kvedit_is_part_of_a_recipes_key(
    folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model(folder, device="cpu")
    assert not read_again(folder, reads)
    monkeypatch.setattr(recipe, "__version__", "0.0.0")
    assert read_again(folder, reads)


def test_plain_parts_give_what_transformers_gives(folder: Path) -> None:
    with torch.no_grad():
        expected = open_stock(folder, device="cpu").network(IDS[None]).logits[0]
    torch.testing.assert_close(logits_of(open_model(folder, device="cpu")), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "stablelm", "nemotron"])
def test_a_checked_model_opens_without_transformers(
    kind: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path)
    folder = checkpoints[kind]
    code = (
        "import sys; from pathlib import Path; from kvedit.checkpoint import opening\n"
        f"opening.recipe.folder = lambda: Path({str(tmp_path)!r})\n"
        f"model = opening.open_model(Path({str(folder)!r}), device='cpu'); model.layout(None)\n"
        "print('transformers' in sys.modules)"
    )
    assert is_plain(open_model(folder, device="cpu"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "False\n", done.stderr


def test_a_prompt_with_the_date_is_built_each_day(folder: Path) -> None:
    def kept() -> Prompt | None:
        open_model(folder, device="cpu")
        found = recipe.find(folder)
        assert found is not None
        return found[0].prompt

    assert kept() == open_stock(folder).model.layout(None)
    path = folder / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d %B') }}" + path.read_text())
    assert kept() is None
    assert open_model(folder, device="cpu").layout(None) == open_stock(folder).model.layout(None)


def edit_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))


def edit_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + " ")


def add_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')


def another_shape(folder: Path) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    held["more"] = torch.zeros(3)
    save_file(held, path, metadata={"format": "pt"})


@pytest.mark.parametrize("change", [edit_config, edit_template, add_file, another_shape])
def test_a_change_that_affects_a_recipe_reads_the_model_again(
    folder: Path, reads: list[Path], change: Callable[[Path], None]
) -> None:
    open_model(folder, device="cpu")
    assert not read_again(folder, reads)
    change(folder)
    assert read_again(folder, reads)


def test_other_weights_of_the_same_shape_are_another_model(folder: Path, reads: list[Path]) -> None:
    model = open_model(folder, device="cpu")
    path = folder / "model.safetensors"
    held = load_file(path)
    held["model.layers.1.mlp.up_proj.weight"].neg_()
    save_file(held, path, metadata={"format": "pt"})
    assert open_model(folder, device="cpu").parts != model.parts
    assert len(reads) == 1


def test_a_dtype_that_was_not_checked_is_read_by_transformers(folder: Path, reads: list[Path]) -> None:
    open_model(folder, device="cpu")
    assert read_again(folder, reads, "bfloat16")
    assert not read_again(folder, reads, "bfloat16")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"layers": 3}', b"\xff"])
def test_a_recipe_that_cannot_be_read_is_ignored(folder: Path, reads: list[Path], content: bytes) -> None:
    open_model(folder, device="cpu")
    for path in recipe.folder().glob("*/recipe.json"):
        path.write_bytes(content)
    assert recipe.find(folder) is None
    assert read_again(folder, reads)


def test_a_recipe_with_a_changed_tokenizer_is_ignored(folder: Path) -> None:
    open_model(folder, device="cpu")
    for path in recipe.folder().glob("*/tokenizer.json"):
        path.write_text(path.read_text() + " ")
    assert recipe.find(folder) is None


def test_an_unwritable_recipe_cache_only_costs_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path / "file" / "recipes")
    assert not is_plain(open_model(folder, device="cpu"))


@pytest.mark.parametrize(("kind", "activation"), [("llama", "gelu"), ("nemotron", "silu")])
def test_unsupported_parts_keep_the_modules_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, activation: str
) -> None:
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path / "recipes")
    folder = save_tiny(tmp_path / "tiny", kind, hidden_act=activation)
    for _ in range(2):
        model = open_model(folder, device="cpu")
        assert not is_plain(model)
    with torch.no_grad():
        expected = open_stock(folder, device="cpu").network(IDS[None]).logits[0]
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=1e-4)


def test_a_norm_that_no_part_reproduces_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RmsNorm, "__call__", lambda self, states: states)
    assert not is_plain(open_model(folder, device="cpu"))


def test_numbers_that_differ_are_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gated, "__call__", lambda self, states: self.gate(states))
    assert not is_plain(open_model(folder, device="cpu"))


def test_damaged_weights_are_refused(folder: Path) -> None:
    open_model(folder, device="cpu")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cannot be read"):
        open_model(folder, device="cpu")


def test_weights_that_a_folder_holds_twice_are_read_once(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    other = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    save_file(other, folder / "consolidated.safetensors", metadata={"format": "pt"})
    model = open_model(folder, device="cpu")
    assert is_plain(model)
    assert torch.equal(model.embed(IDS), held["model.embed_tokens.weight"][IDS])


def test_a_weight_that_is_missing_is_named(folder: Path) -> None:
    open_model(folder, device="cpu")
    found = recipe.find(folder)
    assert found is not None
    with pytest.raises(ModelError, match=r"`model\.embed_tokens\.weight` is missing"):
        assemble(found[0], {}.get)
