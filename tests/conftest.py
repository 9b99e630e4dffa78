"""What the tests share: tiny random checkpoints that prove algebra, and the real default model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.cli.workspace import Workspace, here
from kvedit.model import Model, recipe

FEE_LINES = [f"Line {number}: the fees of item {number} are {number * 37}." for number in range(1, 31)]
SHARED = Path(__file__).resolve().parents[2] / "shared"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
TIED_BIASES = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}


def part_of(share: float) -> dict[str, Any]:
    """RoPE of a share of each head's dimensions."""
    return {**DEFAULT, "partial_rotary_factor": share}


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": DEFAULT}),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": DEFAULT}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": DEFAULT}),
    "mistral": (MistralConfig, MistralForCausalLM, {"rope_parameters": DEFAULT, "sliding_window": None}),
    # Embeddings that are the head too, biases everywhere, and heads that are not hidden / heads wide.
    "llama-tied-biases": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": DEFAULT, **TIED_BIASES}),
    # The first quarter and the first half of each head turn.
    "stablelm": (StableLmConfig, StableLmForCausalLM, {"rope_parameters": part_of(0.25)}),
    "nemotron": (NemotronConfig, NemotronForCausalLM, {"rope_parameters": part_of(0.5)}),
}
CORPUS = [
    "The fees are paid within thirty days of the invoice. The customer may cancel at any time.",
    "One of the codes for the amber-anchor is 4471. Notices are sent in writing, by post or e-mail.",
    "def total(items):\n    return sum(item.price for item in items)\n\n\nclass Order:\n    pass\n",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma\n",
] * 4


def tiny_config(kind: str, **changes: Any) -> Any:
    """The configuration of a tiny random model of that kind: grouped KV heads, three layers."""
    make, _, more = KINDS[kind]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return make(**{**sizes, **more, **changes})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 ids with a chat template: any text round-trips, and lines do merge."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, "\n\n\n\n \n\n\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny random checkpoint of that kind with its tokenizer."""
    torch.manual_seed(seed)
    network = KINDS[kind][1](tiny_config(kind, **changes))
    for name, weights in network.named_parameters():
        if name.endswith("bias"):  # which begin as zeros, and would prove nothing
            torch.nn.init.normal_(weights, std=0.2)
    network.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random checkpoints, one a kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: save_tiny(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_models(checkpoints: dict[str, Path]) -> dict[str, Model]:
    """The tiny checkpoints, opened as users have them: of plain parts, packed, where they have a recipe."""
    found: dict[str, Model] = {}
    for kind, folder in checkpoints.items():
        model = Model.open(folder, device="cpu")
        model.check()
        found[kind] = model.quick()
    return found


@pytest.fixture(scope="session")
def stock_models(checkpoints: dict[str, Path]) -> dict[str, Model]:
    """The tiny checkpoints with the modules of transformers."""
    return {kind: Model.open(folder, device="cpu", stock=True) for kind, folder in checkpoints.items()}


@pytest.fixture(params=list(KINDS))
def stock(request: pytest.FixtureRequest, stock_models: dict[str, Model]) -> Model:
    """Each kind of tiny model in turn, with the modules of transformers."""
    return stock_models[request.param]


@pytest.fixture(params=list(KINDS))
def tiny(request: pytest.FixtureRequest, tiny_models: dict[str, Model]) -> Model:
    """Each kind of tiny model in turn."""
    return tiny_models[request.param]


@pytest.fixture
def llama(tiny_models: dict[str, Model]) -> Model:
    """One tiny model, for what does not depend on the kind."""
    return tiny_models["llama"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sessions of the test's own, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVEDIT_HOME", str(tmp_path / "sessions"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "sessions"


def reset_workspace() -> None:
    """Make the workspace of this process as it is at its start."""
    for field in fields(Workspace):
        setattr(here, field.name, getattr(Workspace(), field.name))


@pytest.fixture(scope="session")
def fee_sessions(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the session `contract` of `FEE_LINES`, whole, never to be changed."""
    root = tmp_path_factory.mktemp("fees")
    (root / "contract.txt").write_text("\n".join(FEE_LINES) + "\n")
    args = ["load", str(root / "contract.txt"), "-m", str(checkpoints["llama"])]
    assert CliRunner().invoke(app, args, env={"KVEDIT_HOME": str(root / "sessions")}).exit_code == 0
    return root / "sessions"


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The default model's folder; the first use on a machine downloads and converts it."""
    from kvedit.model.resolve import DEFAULT_MODEL, resolve

    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def default_model(default_folder: Path) -> Model:
    """The default model, opened once for all tests, as users have it."""
    model = Model.open(default_folder, device="cpu")
    model.check()
    return model.quick()


@pytest.fixture(scope="session")
def haystack() -> Path:
    """The evaluation's long texts, which a stranger's clone does not have."""
    folder = SHARED / "data" / "haystack"
    if not folder.is_dir():
        pytest.skip("the evaluation texts (../shared/data) are not here")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="session", autouse=True)
def _recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Recipes of tiny models do not belong into the user's cache."""
    place = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "folder", lambda: place)
        yield
