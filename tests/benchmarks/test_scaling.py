"""The benchmark of growth, on a tiny model: what it measures, fits and writes.

Run at full size, each verb has a process of its own. Here they share this one, for imports take
longer than all the rest; so the peaks say nothing, and one test starts a process.
"""

from __future__ import annotations

import importlib
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peak import resident
from rigs.tiny import save_tiny

from kvedit.checkpoint.opening import open_model
from kvedit.lab import charts
from kvedit.session.session import Session
from kvedit.session.state import State
from kvedit.store.home import Home
from kvedit.text.document import Document

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
VERBS = ["load", "delete", "open", "ask at 5 %", "ask at full"]
FIGURES = ("seconds", "memory_bytes", "written_bytes")
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def scaling() -> Any:
    return importlib.import_module("scaling")


@pytest.fixture(scope="module")
def page(scaling: Any) -> Any:
    """What puts the tables into a page."""
    return importlib.import_module("scaling_page")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 kB a token, so that a short document outweighs the tokenizer."""
    folder = tmp_path_factory.mktemp("wide")
    more = {"num_hidden_layers": 6, "num_key_value_heads": 4, "head_dim": 32}
    return save_tiny(folder, "llama", max_position_embeddings=2048, **more)


@pytest.fixture(scope="module")
def ran(scaling: Any, page: Any, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the page, and what the command printed."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "performance.md").write_text(f"# Performance\n\n{page.BEGIN}\nold\n{page.END}\n\nThe end.\n")
    options = ["--lengths", "400,800,1600", "--revisions", "1,5", "--rounds", "1", "--model", str(wide)]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(scaling, "apart", lambda work, *args: work(*args))
        patch.setattr("sys.argv", ["scaling.py", *options, "--write", str(folder)])
        patch.setenv("COLUMNS", "80")
        scaling.main()
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def record(ran: tuple[Path, str]) -> dict[str, Any]:
    return dict(json.loads(ran[1].splitlines()[-1]))


def test_the_record_has_samples_fits_and_the_machine(record: dict[str, Any]) -> None:
    assert record["lengths"] == [400, 800, 1600]
    assert list(record["verbs"]) == VERBS
    assert {"processor", "cores", "threads", "torch", "transformers", "kvedit"} <= set(record["machine"])
    for held in record["verbs"].values():
        assert held["base"]["tokens"] < 100
        assert [sample["length"] for sample in held["samples"]] == record["lengths"]
        for sample in held["samples"]:
            assert 0.7 * sample["length"] < sample["tokens"] < 1.1 * sample["length"]
            assert len(sample["seconds"]) == 1
            assert sample["seconds"][0] > 0
            assert sample["peak_bytes"] > 1e7


def test_exponents_are_those_of_the_samples(record: dict[str, Any]) -> None:
    fitted = 0
    for held in record["verbs"].values():
        tokens, base = [sample["tokens"] for sample in held["samples"]], held["base"]
        found = {
            "seconds": [sample["seconds"][0] for sample in held["samples"]],
            "memory_bytes": [sample["peak_bytes"] - base["peak_bytes"] for sample in held["samples"]],
            "written_bytes": [sample["written_bytes"] for sample in held["samples"]],
        }
        for figure in FIGURES:
            values, slope = found[figure], held[figure]["exponent"]
            assert held[figure]["values"] == values
            if min(values) > 0:
                slopes = np.polyfit(np.log(tokens), np.log(values), 1)
                assert slope == pytest.approx(slopes[0])
                fitted += 1
            else:
                assert slope is None
    assert fitted >= 5 + 4  # all seconds, and the bytes of all but `open`


def test_a_load_writes_in_proportion_and_a_deletion_a_constant(
    record: dict[str, Any],
) -> None:
    written = {verb: held["written_bytes"] for verb, held in record["verbs"].items()}
    assert written["load"]["exponent"] == pytest.approx(1, abs=0.2)
    assert written["delete"]["exponent"] == pytest.approx(0, abs=0.2)
    assert max(written["delete"]["values"]) < 4000
    assert written["open"]["values"] == [0, 0, 0]
    cache = 6 * 4 * 32 * 2 * 4  # a token: layers, heads, width, keys and values, float32
    for sample in record["verbs"]["load"]["samples"]:
        assert sample["tokens"] * cache < sample["written_bytes"] < sample["tokens"] * cache + 200_000
    for verb, share in (("ask at 5 %", 0.05), ("ask at full", 1.0)):
        for sample in record["verbs"][verb]["samples"]:
            open_rows = sample["tokens"] - sample["first"]
            assert share * open_rows - 1 <= sample["rows"] <= share * open_rows + 10  # and rows of the seam
            assert sample["rows"] * cache < sample["written_bytes"] < sample["rows"] * cache + 20_000


def test_the_expected_exponent_lies_between_rows_and_pairs(scaling: Any, record: dict[str, Any]) -> None:
    low, high = record["verbs"]["load"]["seconds"]["expected"]
    assert 1 < low == high < 2
    ready = scaling.Ready(Path(), weights=7, pairs=3, texts={})
    sample = {"tokens": 5, "first": 2, "rows": 3, "question": 2}
    seen = [3, 4, 5, 6, 7]  # keys that each of the five rows reads
    assert scaling.work(ready, sample) == sum(7 + 2 * 3 * keys for keys in seen)


def test_a_past_has_the_requested_number_of_revisions(record: dict[str, Any]) -> None:
    past = record["past"]
    one, five = past["samples"]
    assert (one["revisions"], five["revisions"]) == (1, 5)
    assert (one["edits"], one["segments_added"], five["segments_added"]) == (0, 0, 0)
    assert five["edits"] >= 4
    assert past["loaded_bytes"] > 6144 * past["tokens"]
    for sample in past["samples"]:
        assert all(len(sample[name]) == 1 for name in ("edit_s", "open_s", "status_s", "status_more_s"))
        assert 0 < sample["edit_bytes"] < 4000
    assert one["status_more_s"] == [0]


def test_the_tables_fit_80_columns(ran: tuple[Path, str]) -> None:
    *lines, _ = ran[1].splitlines()
    assert len(lines) > 4 * 5
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_writing_the_page_again_changes_nothing(
    page: Any, ran: tuple[Path, str], record: dict[str, Any]
) -> None:
    folder = ran[0]
    text, drawn = (folder / "performance.md").read_text(), (folder / "scaling.svg").read_text()
    assert text.startswith(f"# Performance\n\n{page.BEGIN}\n")
    assert text.endswith(f"{page.END}\n\nThe end.\n")
    assert "old" not in text
    page.write(folder, record)
    assert ((folder / "performance.md").read_text(), (folder / "scaling.svg").read_text()) == (text, drawn)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0] for row in rows[2:7]] == [f"| {verb}" for verb in VERBS]
    assert [row.count("|") for row in rows] == 3 * 7 * [7] + 8 * [4]


def test_a_page_without_markers_gets_the_tables_at_its_end(
    page: Any, record: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "performance.md").write_text("Before.\n")
    for _ in range(2):
        page.write(tmp_path, record)
        text = (tmp_path / "performance.md").read_text()
        assert text.startswith(f"Before.\n{page.BEGIN}\n")
        assert (text.count(page.BEGIN), text.count(page.END)) == (1, 1)


def test_the_plot_has_one_line_per_verb_with_its_slope(ran: tuple[Path, str], record: dict[str, Any]) -> None:
    root = ET.parse(ran[0] / "scaling.svg").getroot()
    assert root.tag == f"{SVG}svg"
    chart = root.find(f"{SVG}svg[@class='chart']")
    assert chart is not None
    texts = [part.text or "" for part in root.iter(f"{SVG}text")]
    for verb, held in record["verbs"].items():
        assert f"{verb}: exponent {held['seconds']['exponent']:z.2f}" in texts
    assert sum("tokens" in text or "Time, s" in text for text in texts) == 2
    marks = [part for part in chart.iter() if "mark" in part.get("class", "").split()]
    assert len(marks) == 3 * len(VERBS)
    # On log scales, points of twice the tokens stand equally far apart.
    x = charts.logarithmic("", [100, 1000])
    assert x.place(400, 0, 1) - x.place(200, 0, 1) == pytest.approx(x.place(800, 0, 1) - x.place(400, 0, 1))


def test_an_exponent_is_fitted_or_left_out(scaling: Any) -> None:
    assert scaling.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert scaling.exponent([1, 2, 4], [5, 5, 5]) == pytest.approx(0)
    assert scaling.exponent([1, 2], [0, 1]) is None
    assert scaling.exponent([7], [3]) is None


def test_bytes_of_new_replaced_and_grown_files_are_counted(scaling: Any, tmp_path: Path) -> None:
    for name in ("kept", "grown", "replaced"):
        (tmp_path / name).write_bytes(b"x" * 100)
    before = scaling.files(tmp_path)
    with (tmp_path / "grown").open("ab") as file:
        file.write(b"x" * 7)
    (tmp_path / "new").write_bytes(b"x" * 50)
    (tmp_path / "new").replace(tmp_path / "replaced")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "came").write_bytes(b"x" * 1000)
    assert scaling.written_bytes(before, scaling.files(tmp_path)) == 7 + 50 + 1000


def test_a_length_that_does_not_fit_is_reduced_until_it_does(scaling: Any, wide: Path, home: Path) -> None:
    ready = scaling.prepare(str(wide), [300, 5_000, 50_000])
    short, longest = sorted(ready.texts)
    assert short == 300
    assert 1900 < longest < 2048
    model, question = open_model(wide, device="cpu"), importlib.import_module("rounds").QUESTION
    prompt = model.layout(None)
    around = len(prompt.head_ids) + len(prompt.question_ids(model.tokenizer, question)) + 1
    assert longest + around == model.context_length
    session = Session.load(Document(ready.texts[longest]), model=model, home=home)
    assert len(session._state.tokens) <= longest
    session.ask(question, budget="0", max_new_tokens=1, keep=False)


def test_each_verb_has_its_own_process_and_deleting_no_torch(scaling: Any, wide: Path, home: Path) -> None:
    place = scaling.Place(wide, scaling.TINY, Home(home).store("tiny"))
    scaling.load(place, True)
    apart: Callable[..., Any] = scaling.apart
    found = apart(scaling.cost, "delete", scaling.Place(wide, scaling.TINY, place.store), 2)
    assert found["peak_bytes"] < resident("VmRSS") / 2
    assert len(found["seconds"]) == 2
    assert Session(State(place.store)).document.line_count == 5


def test_a_round_is_counted_even_without_time_for_it(
    scaling: Any, wide: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = scaling.Place(wide, scaling.TINY, Home(home).store("tiny"))
    scaling.load(place, True)
    monkeypatch.setattr(scaling, "ALLOWED_S", 0)
    assert len(scaling.cost("delete", place, 5)["seconds"]) == 1
