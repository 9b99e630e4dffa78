"""What the tests share: tiny random checkpoints that prove algebra, and the real default model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs.tiny import KINDS, save_tiny
from support.sessions import FEE_LINES
from typer.testing import CliRunner

from kvedit.checkpoint import recipe
from kvedit.checkpoint.compare import Stock
from kvedit.checkpoint.opening import open_model, open_stock
from kvedit.cli.app import app
from kvedit.model.model import Model

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny random checkpoints, one a kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: save_tiny(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def tiny_models(checkpoints: dict[str, Path]) -> dict[str, Model]:
    """The tiny checkpoints, opened as users have them: of plain parts, packed."""
    return {kind: open_model(folder, device="cpu") for kind, folder in checkpoints.items()}


@pytest.fixture(scope="session")
def stocks(checkpoints: dict[str, Path]) -> dict[str, Stock]:
    """The tiny checkpoints as transformers reads them."""
    return {kind: open_stock(folder, device="cpu") for kind, folder in checkpoints.items()}


@pytest.fixture(scope="session")
def stock_models(stocks: dict[str, Stock]) -> dict[str, Model]:
    """The tiny checkpoints, with the modules of transformers as parts."""
    return {kind: stock.model for kind, stock in stocks.items()}


@pytest.fixture(params=list(KINDS))
def stock(request: pytest.FixtureRequest, stocks: dict[str, Stock]) -> Stock:
    """Each kind of tiny checkpoint in turn, as transformers reads it."""
    return stocks[request.param]


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
    from kvedit.checkpoint.resolve import resolve
    from kvedit.names import DEFAULT_MODEL

    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def default_model(default_folder: Path) -> Model:
    """The default model, opened once for all tests, as users have it."""
    return open_model(default_folder, device="cpu")


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
