"""Decode weights of fewer bits: nearly the same numbers, and nothing of them in what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rigs.reference import load_session
from support.sessions import FEE_LINES
from typer.testing import CliRunner

import kvedit.cache.memory
from kvedit.cli.app import app
from kvedit.errors import KveditError, UsageError
from kvedit.model import reduced as reduced_room
from kvedit.model.model import Model
from kvedit.model.network import Linear
from kvedit.model.packed import Packed
from kvedit.model.reduced import Packed4, Packed16, quantise, reduce
from kvedit.names import DECODE_WEIGHTS

TEXT = "\n".join(FEE_LINES)
QUESTION = "What are the fees of item 7?"


def of_four_bits(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as a 4-bit checkpoint holds them, rounded to 16 bits; and their numbers."""
    chance = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (rows, width // 32, 32), generator=chance)
    numbers[..., 0], numbers[..., 1] = 0, 15  # the least and the largest number are what sets the scale
    scales = torch.rand(rows, width // 32, 1, generator=chance) * 0.01 + 0.005
    weight = (numbers * scales - 7.3 * scales).half().float()
    return weight.view(rows, width), numbers.view(rows, width)


def test_numbers_of_four_bits_are_found() -> None:
    weight, numbers = of_four_bits(48, 96)
    found = quantise(weight)
    assert found is not None
    assert torch.equal(found[0], numbers.int())
    scales = found[1].transpose(0, 1).repeat_interleave(32, 1)
    again = (found[0] - 8) * scales[..., 0] + scales[..., 1]
    torch.testing.assert_close(again, weight, atol=2e-4, rtol=0)


@pytest.mark.parametrize("change", ["one weight", "rows", "width"])
def test_other_weights_are_not_taken_for_four_bits(change: str) -> None:
    weight, _ = of_four_bits(48, 96)
    if change == "one weight":
        weight[17, 40] += 0.3 * (weight[17, 32:64].max() - weight[17, 32:64].min()) / 15
    weight = {"rows": weight[:47], "width": weight[:, :95]}.get(change, weight)
    assert quantise(weight) is None


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_layers_of_fewer_bits_give_nearly_the_same(biases: bool, rows: int) -> None:
    weight, _ = of_four_bits(64, 128)
    bias = torch.linspace(-1, 1, 64) if biases else None
    states = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    layer = Packed(Linear(weight, bias))
    assert torch.equal(layer.weight, weight)
    found = quantise(weight)
    assert found is not None
    wanted = states @ weight.T + (0 if bias is None else bias)
    for reduced in (Packed16(layer), Packed4(layer, *found)):
        given = reduced(states)
        assert given.dtype == torch.float32
        assert not torch.equal(given, wanted)  # it does have fewer bits
        assert float((given - wanted).abs().max()) < 0.02 * float(wanted.std())


def test_a_model_that_cannot_be_reduced_is_refused(llama: Model, stock_models: dict[str, Model]) -> None:
    with pytest.raises(UsageError, match="Unknown decode weights 'int2'"):
        llama.reduced("int2")
    with pytest.raises(UsageError, match="not 4-bit"):
        llama.reduced("int4")
    with pytest.raises(UsageError, match="needs float32 on a CPU"):
        stock_models["llama"].reduced("bf16")
    assert llama.reduced(None) is llama


def test_a_copy_that_does_not_fit_into_memory_is_refused_first(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = llama.network
    made: list[int] = []
    monkeypatch.setattr(reduced_room, "Packed16", lambda layer: made.append(layer.weight.numel()) or layer)
    reduce(network, "bf16")
    needed = 2 * sum(made)
    monkeypatch.setattr(kvedit.cache.memory, "available_bytes", lambda device: needed)
    reduce(network, "bf16")  # it just fits
    monkeypatch.setattr(kvedit.cache.memory, "available_bytes", lambda device: needed - 1)
    made.clear()
    with pytest.raises(
        KveditError, match=r"Decoding with bf16 needs \S+ MB of memory in addition to the model"
    ):
        reduce(network, "bf16")
    assert not made


def test_a_reduced_model_is_built_once_and_changes_no_weights(llama: Model) -> None:
    ids = torch.arange(20)

    def logits(model: Model) -> torch.Tensor:
        return model.logits(model.walk(ids, slice(0, 20), model.new_cache(20), outputs=20).hidden)

    before = logits(llama)
    reduced = llama.reduced("bf16")
    assert llama.reduced("bf16") is reduced
    assert torch.equal(logits(llama), before)
    assert 0 < float((logits(reduced) - before).abs().max()) < 0.2 * float(before.std())


def test_layers_that_are_not_of_four_bits_are_of_sixteen(llama: Model) -> None:
    weight, _ = of_four_bits(64, 64)
    first, second, *others = llama.network.layers
    second = replace(second, mlp=(*second.mlp[:-1], Packed(Linear(weight, None))))
    layers = reduce(replace(llama.network, layers=(first, second, *others)), "int4").layers
    assert type(layers[1].mlp[-1]) is Packed4
    assert {type(layer.output) for layer in layers} == {Packed16}


def test_a_conversation_keeps_rows_of_the_models_own_weights(llama: Model, home: Path) -> None:
    session = load_session(home, llama, TEXT)
    first = session.ask(QUESTION, max_new_tokens=12, conversation=True, decode_weights="bf16")
    assert len(first.ids) > 2
    found = session.verify()
    assert found.exact
    assert max(*found.keys, *found.values) < 1e-5
    assert "--decode-weights bf16" in session.script()


def test_the_decode_weights_option_works_or_is_refused(
    home: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def run(*args: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, [*args])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    (tmp_path / "fees.txt").write_text(TEXT)
    run("load", "fees.txt", "--model", str(checkpoints["llama"]))
    asked = ("ask", QUESTION, "--max-new-tokens", "4", "--json", "--decode-weights")
    assert json.loads(run(*asked, "bf16"))["answer_ids"]
    assert "not 4-bit" in run(*asked, "int4", code=2)
    assert "Unknown decode weights 'fp8'" in run(*asked, "fp8", code=2)


@pytest.mark.model
@pytest.mark.parametrize("kind", DECODE_WEIGHTS)
def test_the_default_model_says_nearly_the_same_with_fewer_bits(
    kind: str, default_model: Model, tmp_path: Path
) -> None:
    """`benchmarks/llama.py` counts a thousand tokens; here are some hundred."""
    model = default_model
    session = load_session(tmp_path, model, TEXT)
    said = session.ask("List the fees of all items.", budget="0", max_new_tokens=120, keep=False).ids
    cache, start = session._state.working.cache, len(session.rows)
    question = session._state.prompt.question_ids(session._state.tokenizer, "List the fees of all items.")
    ids = torch.from_numpy(np.concatenate([question, np.array(said)]))
    agreed = 0
    cache.length = start
    model.walk(ids[: len(question)], slice(start, start + len(question)), cache)
    for at in range(len(question), len(ids) - 1):
        found = model.reduced(kind).walk(ids[at : at + 1], slice(start + at, start + at + 1), cache)
        agreed += int(model.reduced(kind).logits(found.hidden)[0].argmax()) == int(ids[at + 1])
    assert agreed / (len(said) - 1) > 0.95
