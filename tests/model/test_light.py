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

from kvedit.checkpoint import compare, recipe
from kvedit.errors import ModelError
from kvedit.model import network as light
from kvedit.model.model import Model
from kvedit.repair.refresh import prefill_

PLAIN = [kind for kind in KINDS if kind not in ("stablelm", "nemotron")]  # those norm otherwise
IDS = torch.arange(60) * 11 % 500


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint of the test's own, and recipes of its own."""
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path / "recipes")
    shutil.copytree(checkpoints["llama"], tmp_path / "tiny")
    return tmp_path / "tiny"


def is_light(model: Model) -> bool:
    return isinstance(model.network, light.Network)


def opened_twice(folder: Path, dtype: str = "auto") -> Model:
    first = Model.open(folder, device="cpu", dtype=dtype)
    assert not is_light(first)
    first.check()
    return Model.open(folder, device="cpu", dtype=dtype)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checked_model_opens_as_plain_parts_with_equal_numbers(
    kind: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path)
    monkeypatch.setattr(light.Packed, "can_hold", lambda weight: False)
    stock = Model.open(checkpoints[kind], device="cpu", dtype=dtype, stock=True)
    model = opened_twice(checkpoints[kind], dtype)
    assert is_light(model)
    logits = []
    for one in (stock, model):
        cache = one.new_cache(len(IDS))
        for _ in prefill_(one, cache, IDS[:40]):
            pass
        logits.append(one.logits(one.walk(IDS[40:], slice(40, 60), cache, outputs=20).hidden))
        logits.append(cache.keys)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    for name in ("parts", "stop_ids", "layers", "heads", "groups", "width", "scaling", "context_length"):
        assert getattr(model, name) == getattr(stock, name)
    assert model.tokenizer.serialized == stock.tokenizer.serialized
    assert model.layout("Be brief.") == stock.layout("Be brief.")
    model.check()  # has passed


@pytest.mark.parametrize("biases", ["none", "all", "some"])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_packed_layers_are_the_layers_side_by_side(biases: str, rows: int) -> None:
    chance = torch.Generator().manual_seed(rows)
    with_bias = {"none": (), "all": (48, 16, 7), "some": (16,)}[biases]
    layers = [
        light.Linear(
            torch.randn(size, 40, generator=chance),
            torch.randn(size, generator=chance) if size in with_bias else None,
        )
        for size in (48, 16, 7)
    ]
    states = torch.randn(rows, 40, generator=chance)
    assert light.Packed.can_hold(layers[0].weight)
    packed = light.Packed(*layers)
    slowly = torch.cat(
        [states @ layer.weight.T + (0 if layer.bias is None else layer.bias) for layer in layers], 1
    )
    torch.testing.assert_close(packed(states), slowly, atol=1e-5, rtol=1e-5)


def test_only_float32_on_a_cpu_is_packed(folder: Path) -> None:
    assert opened_twice(folder).network.packed
    assert not opened_twice(folder, "bfloat16").network.packed


def test_a_model_that_was_just_checked_becomes_quick_with_the_same_numbers(folder: Path) -> None:
    first = Model.open(folder, device="cpu")
    assert first.quick() is first  # nothing is known of it
    first.check()
    quick = first.quick()
    assert is_light(quick)
    assert quick.quick() is quick
    assert quick.parts == first.parts
    logits = [
        one.logits(one.walk(IDS, slice(0, 60), one.new_cache(60), outputs=60).hidden)
        for one in (first, quick)
    ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_packed_layers_that_give_other_numbers_make_no_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = light.Packed.__call__
    monkeypatch.setattr(light.Packed, "__call__", lambda self, states: 1.1 * call(self, states))
    model = Model.open(folder, device="cpu")
    model.check()
    assert model.quick() is model


def test_a_refused_recipe_is_not_compared_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = []
    monkeypatch.setattr(compare, "_same", lambda model, plain: bool(comparisons.append(plain)))
    for _ in range(2):
        Model.open(folder, device="cpu").check()
    assert len(comparisons) == 1
    edit_config(folder)
    Model.open(folder, device="cpu").check()
    assert len(comparisons) == 2
    Model.open(folder, device="cpu", dtype="bfloat16").check()
    assert len(comparisons) == 3


def test_the_version_of_kvedit_is_part_of_a_recipes_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_light(opened_twice(folder))
    monkeypatch.setattr(recipe, "__version__", "0.0.0")
    assert not is_light(Model.open(folder, device="cpu"))


def test_plain_parts_give_what_transformers_gives(folder: Path) -> None:
    model = opened_twice(folder)
    stock = Model.open(folder, device="cpu", stock=True)
    with torch.no_grad():
        wanted = stock.network(IDS[None]).logits[0]
    found = model.logits(model.walk(IDS, slice(0, 60), model.new_cache(60), outputs=60).hidden)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_checked_model_opens_without_transformers(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvedit.model.model import Model, recipe\n"
        f"recipe.folder = lambda: Path({str(recipe.folder())!r})\n"
        f"model = Model.open(Path({str(folder)!r}), device='cpu'); model.check(), model.layout(None)\n"
        "print('transformers' in sys.modules)"
    )
    opened_twice(folder)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "False\n", done.stderr


def test_a_prompt_that_names_the_day_is_made_each_day(folder: Path) -> None:
    assert opened_twice(folder).network.recipe.prompt == Model.open(folder, stock=True).layout(None)
    path = folder / "chat_template.jinja"
    path.write_text("{{ strftime_now('%d %B') }}" + path.read_text())
    model = opened_twice(folder)
    assert model.network.recipe.prompt is None
    assert model.layout(None) == Model.open(folder, stock=True).layout(None)


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
def test_a_change_of_what_a_recipe_follows_from_asks_transformers_again(
    folder: Path, change: Callable[[Path], None]
) -> None:
    assert is_light(opened_twice(folder))
    change(folder)
    assert not is_light(Model.open(folder, device="cpu"))


def test_other_weights_of_the_same_shape_are_another_model_by_its_parts(folder: Path) -> None:
    model = opened_twice(folder)
    path = folder / "model.safetensors"
    held = load_file(path)
    held["model.layers.1.mlp.up_proj.weight"].neg_()
    save_file(held, path, metadata={"format": "pt"})
    other = Model.open(folder, device="cpu")
    assert is_light(other)
    assert other.parts != model.parts


def test_a_dtype_that_was_not_checked_goes_the_long_way(folder: Path) -> None:
    assert is_light(opened_twice(folder))
    assert not is_light(Model.open(folder, device="cpu", dtype="bfloat16"))
    assert not is_light(Model.open(folder, device="cpu", stock=True))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"layers": 3}', b"\xff"])
def test_a_recipe_that_cannot_be_read_is_as_none(folder: Path, content: bytes) -> None:
    opened_twice(folder)
    for path in recipe.folder().glob("*/recipe.json"):
        path.write_bytes(content)
    assert recipe.find(folder) is None
    assert not is_light(Model.open(folder, device="cpu"))


def test_another_tokenizer_beside_a_recipe_is_as_none(folder: Path) -> None:
    opened_twice(folder)
    for path in recipe.folder().glob("*/tokenizer.json"):
        path.write_text(path.read_text() + " ")
    assert recipe.find(folder) is None


def test_a_cache_that_cannot_be_written_only_costs_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path / "file" / "recipes")
    assert not is_light(opened_twice(folder))


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {"hidden_act": "gelu"}), ("stablelm", {}), ("nemotron", {})]
)
def test_parts_that_are_not_plain_are_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, str]
) -> None:
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path / "recipes")
    assert not is_light(opened_twice(save_tiny(tmp_path / "tiny", kind, **changes)))


def test_numbers_that_differ_are_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light.RmsNorm, "__call__", lambda self, states: states)
    assert not is_light(opened_twice(folder))


def test_damaged_weights_are_refused(folder: Path) -> None:
    opened_twice(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cannot be read"):
        Model.open(folder, device="cpu")


def test_weights_that_a_folder_holds_twice_are_read_once(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    other = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    save_file(other, folder / "consolidated.safetensors", metadata={"format": "pt"})
    model = opened_twice(folder)
    assert is_light(model)
    assert torch.equal(model.embed(IDS), held["model.embed_tokens.weight"][IDS])


def test_a_weight_that_is_missing_is_named(folder: Path) -> None:
    opened_twice(folder)
    found = recipe.find(folder)
    assert found is not None
    with pytest.raises(ModelError, match=r"`model\.norm\.weight` is missing"):
        light.Network(found[0], {}.get)
