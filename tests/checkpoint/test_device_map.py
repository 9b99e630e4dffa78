"""A model spread over devices: the same numbers, and nothing that a second device would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import attach_align_device_hook, attach_execution_device_hook
from rigs.reference import stock_network
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from kvedit.checkpoint.adapt import from_transformers
from kvedit.checkpoint.compare import Stock
from kvedit.checkpoint.opening import admit, open_stock
from kvedit.checkpoint.read import read_network
from kvedit.errors import ModelError
from kvedit.lab.arms import Arm
from kvedit.lab.case import Case
from kvedit.lab.trial import run_case
from kvedit.model.model import Model
from kvedit.policies.registry import POLICIES
from kvedit.text.document import Edit

CPU = torch.device("cpu")
FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)
LINES = [f"Line {number}: the fees of item {number} are {number * 37}.\n" for number in range(1, 9)]
CASE = Case(
    name="fees",
    source="fees",
    text="".join(LINES),
    edits=(Edit(len(LINES[0]), len(LINES[0]) + len(LINES[1]), "It is free.\n"),),
    question="What are the fees of item 7?",
    answers=("259",),
    stale="74",
    opening="The fees are",
    max_new_tokens=4,
)


class Pretend(TorchFunctionMode):
    """Pretends that the CPU is several devices, and refuses what mixes them, as real ones do.

    A tensor's device is where it was made or moved to; `cpu` without a number is the host. The
    host's scalars and indices may meet any device, and a copy into a tensor may come from any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = WeakTensorKeyDictionary()

    def put(self, module: Any, device: torch.device) -> None:
        for part in (*module.parameters(), *module.buffers()):
            self.places[part] = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        if function == Tensor.device.__get__:  # another object at each look
            return self.places.get(args[0], CPU)
        checked = tensors[:1]
        if function in (Tensor.__setitem__, Tensor.copy_):
            checked += [part for part in tree_leaves(args[1:-1]) if isinstance(part, Tensor)]
        elif function is not Tensor.__getitem__:
            checked = tensors
        places = [(part.dim(), self.places.get(part, CPU)) for part in checked]
        met = {place for size, place in places if size or place != CPU} or {CPU}
        if len(met) > 1:
            raise RuntimeError(f"{function} meets {sorted(map(str, met))}")
        asked = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.device)]
        place = asked[0] if asked else CPU if function is Tensor.cpu else met.pop()
        args, kwargs = tree_map(lambda part: CPU if isinstance(part, torch.device) else part, (args, kwargs))
        made = function(*args, **kwargs)
        for part in tree_leaves(made):
            if isinstance(part, Tensor):
                if args and part is args[0] and self.places.get(part, CPU) != place:
                    made = part = part.clone()
                self.places[part] = place
        return made


def like(model: Model, network: Any) -> Model:
    parts = from_transformers(network)
    return Model(model.directory, parts, model.tokenizer, model.stop_ids, model.parts, model.layout)


def walked(model: Model) -> list[Tensor]:
    """Many adjacent rows, some scattered ones again, and logits: all that a walk does."""
    ids = torch.arange(300, device=model.device) * 7 % 512
    cache = model.new_cache(300)
    first = model.walk(ids, slice(0, 300), cache, outputs=3)
    rows = torch.tensor([5, 6, 40, 299], device=model.device)
    second = model.walk(ids[rows] + 1, rows, cache, outputs=4)
    logits = [model.logits(part.hidden) for part in (first, second)]
    return [*logits, cache.keys, cache.values, second.states.keys]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def without_times(record: dict[str, Any]) -> str:
    for arm in record["arms"].values():
        del arm["seconds"]
    return json.dumps(record)


def spread_map(*layers: str) -> dict[str, str]:
    """A device for each module of a tiny model, `layers` for its three layers."""
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return dict.fromkeys(names, "cpu") | {f"model.layers.{at}": name for at, name in enumerate(layers)}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
def test_a_map_onto_one_device_changes_no_bit(checkpoints: dict[str, Path], stock_models, kind: str):
    network = read_network(checkpoints[kind], torch.float32, CPU, {"": "cpu"})
    mapped = like(stock_models[kind], network)
    assert not mapped.spread
    assert equal(walked(mapped), walked(stock_models[kind]))


def test_a_device_map_uses_the_available_devices(checkpoints: dict[str, Path]):
    mapped, plain = (
        open_stock(checkpoints["llama"], device=name, dtype="float32") for name in ("map", "auto")
    )
    assert mapped.model.device.type == plain.model.device.type
    assert equal(walked(mapped.model), walked(plain.model))
    admit(mapped)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_offloaded_layers_change_no_bit(checkpoints: dict[str, Path], stock_models, kind: str):
    network = read_network(checkpoints[kind], torch.float32, CPU)
    for layer in network.model.layers[1:]:
        attach_align_device_hook(layer, execution_device=CPU, offload=True)
    assert network.model.layers[2].self_attn.q_proj.weight.device.type == "meta"
    waiting = like(stock_models[kind], network)
    assert equal(walked(waiting), walked(stock_models[kind]))
    admit(Stock(waiting, network))


def nearly(left: Any, right: Any) -> bool:
    """Whether two records are the same but for rounding."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(nearly(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(nearly, left, right))
    return left == (pytest.approx(right, rel=1e-4, abs=1e-5) if isinstance(right, float) else right)


def test_every_policy_gives_the_same_record_on_a_spread_model(checkpoints: dict[str, Path], stock_models):
    network = read_network(checkpoints["qwen3"], torch.float32, CPU)
    arms = [Arm.parse(name) for name in ("shift", "replay", "reprefill", *(f"{one}@20%" for one in POLICIES))]
    far = (*network.model.layers[1:], network.model.norm, network.model.rotary_emb, network.lm_head)
    for part in far:
        attach_execution_device_hook(part, SECOND)
    with Pretend() as devices:
        devices.put(network, FIRST)
        for part in far:
            devices.put(part, SECOND)
        spread = like(stock_models["qwen3"], network)
        record, clean = run_case(spread, CASE, arms)
        assert spread.device == clean.cache.keys.device == FIRST
    plain, _ = run_case(stock_models["qwen3"], CASE, arms)
    # The last digits may differ: where a tensor lies in memory decides how some sums are split.
    assert nearly(json.loads(without_times(record)), json.loads(without_times(plain)))


def test_the_pretended_devices_do_refuse_each_other():
    with Pretend() as devices:
        linear = torch.nn.Linear(2, 2)
        devices.put(linear, SECOND)
        rows = torch.ones(3, 2, device=FIRST)
        with pytest.raises(RuntimeError, match="meets"):
            linear(rows)
        with pytest.raises(RuntimeError, match="meets"):
            rows + torch.ones(3, 2)
        moved = rows.to(SECOND)
        assert (rows.device, moved.device, linear(moved).device) == (FIRST, SECOND, SECOND)
        rows[1:] = moved[1:] + 1
        assert rows.device == FIRST


def test_layers_on_the_disk_are_refused(checkpoints: dict[str, Path]):
    with pytest.raises(ModelError, match="does not fit") as caught:
        read_network(checkpoints["llama"], torch.float32, CPU, spread_map("cpu", "cpu", "disk"))
    assert "more memory" in caught.value.remedy


def test_a_model_is_spread_when_its_map_names_several_devices(llama: Model):
    network = stock_network(llama)
    assert not like(llama, network).spread
    network.hf_device_map = spread_map("cpu", "cpu", "cuda:1")
    assert like(llama, network).spread
