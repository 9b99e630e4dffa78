"""`kvedit doctor`: it passes what is right, fails what is wrong, and says what the machine will do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.tiny import save_tiny
from typer.testing import CliRunner

from kvedit.cache.rope import Rope
from kvedit.checkpoint.compare import Stock
from kvedit.checkpoint.opening import open_stock
from kvedit.cli.app import app
from kvedit.model.model import Model
from kvedit.repair import refresh
from kvedit.repair.doctor import examine

NAMES = "forward pass,end of context,rotation,shift,full budget,greedy tokens,packed, interval"


def doctor(*args: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["doctor", *map(str, args)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def failed(*args: str | Path) -> set[str]:
    found = json.loads(doctor(*args, "--json", code=4).stdout)
    assert found["passed"] is False
    return {check["name"] for check in found["checks"] if not check["passed"]}


def test_every_admitted_kind_passes_every_check(stock: Stock) -> None:
    found = examine(stock)
    assert found.passed, found.checks
    assert ",".join(check.name for check in found.checks) == NAMES
    assert all(check.figure <= check.limit for check in found.checks)
    rotation = next(check for check in found.checks if check.name == "rotation")
    assert rotation.figure == rotation.limit == 0  # bit for bit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_doctor_reports_its_checks_within_80_columns(
    home: Path, checkpoints: dict[str, Path], dtype: str
) -> None:
    printed = doctor(checkpoints["qwen3"], "--dtype", dtype).stdout
    assert printed.count("  pass ") == 7
    assert all(len(line) <= 80 for line in printed.splitlines() if str(checkpoints["qwen3"]) not in line)
    assert f"{dtype} (as given)" in printed
    record = json.loads(doctor(checkpoints["qwen3"], "--dtype", dtype, "--json").stdout)
    machine, size = record["machine"], 4 if dtype == "float32" else 2
    assert (machine["dtype"], machine["threads"]) == (dtype, torch.get_num_threads())
    assert machine["context_length"] == 1024
    assert machine["cache_bytes"] == 2 * 3 * 2 * 16 * size * 1000
    weights = open_stock(checkpoints["qwen3"], device="cpu").network.parameters()
    assert machine["weights_bytes"] == sum(part.numel() for part in weights) * size
    assert [load["tokens"] for load in machine["estimates"]] == [1000]  # 4,000 do not fit its context
    speed = machine["prefill_tokens_per_s"]
    assert machine["estimates"][0]["seconds"] > 1000 / speed  # attention grows faster than the text


def test_the_rule_for_the_dtype_is_shown(home: Path, checkpoints: dict[str, Path]) -> None:
    printed = doctor(checkpoints["llama"], "--device", "cpu").stdout
    assert "cpu (as given)" in printed
    assert "float32 (default: float32 on a CPU, bfloat16 elsewhere)" in printed


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every model that is opened be changed first."""

    def spoiled(directory: Path, **options: Any) -> Stock:
        stock = open_stock(directory, **options)
        change(stock.model)
        return stock

    monkeypatch.setattr("kvedit.checkpoint.opening.open_stock", spoiled)


def test_another_rope_fails(
    home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bend(model: Model) -> None:
        model.rope = Rope(model.rope.inverse_frequencies * 0.9, 1.0)

    broken(monkeypatch, bend)
    assert {"forward pass", "rotation"} <= failed(checkpoints["llama"])
    result = doctor(checkpoints["llama"], code=4)
    assert "FAIL" in result.stdout
    assert "checks failed: forward pass" in result.stderr


def test_a_shift_that_does_not_rotate_fails(
    home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "rotate", lambda states, cos, sin, out: out.copy_(states))
    assert {"shift", "full budget"} <= failed(checkpoints["llama"])


def test_a_refresh_that_leaves_a_row_out_fails(
    home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = refresh._parts

    def lazy(rows: Any, executor: Any) -> Any:
        return parts(rows[:-1] if executor == "interval" else rows, executor)

    monkeypatch.setattr(refresh, "_parts", lazy)
    assert failed(checkpoints["llama"]) == {"packed, interval"}


def test_states_that_see_too_much_fail(
    home: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_seen(rows: torch.Tensor, limit: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, 1, len(rows), limit, dtype=dtype)

    monkeypatch.setattr("kvedit.model.attention._mask", all_seen)
    assert "forward pass" in failed(checkpoints["llama"])


def test_nan_does_not_pass(home: Path, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "nan", "llama")
    network = open_stock(folder, device="cpu").network
    network.model.layers[1].mlp.down_proj.weight[3] = float("nan")
    network.save_pretrained(folder)
    assert "forward pass" in failed(folder)


def test_a_refused_model_gets_no_table(home: Path, tmp_path: Path) -> None:
    result = doctor(save_tiny(tmp_path / "windowed", "mistral", sliding_window=16), code=4)
    assert "sliding_window" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("option", ["--device", "--dtype"])
def test_unknown_devices_and_dtypes_are_usage_errors(home: Path, option: str) -> None:
    assert f"Unknown {option[2:]} 'abacus'" in doctor(option, "abacus", code=2).stderr


@pytest.mark.model
def test_the_default_model_is_healthy(home: Path, default_folder: Path) -> None:
    printed = doctor("--device", "cpu").stdout
    assert printed.count("  pass ") == 7
    assert "4,000 tokens in" in printed
    assert "8,192 tokens" in printed
