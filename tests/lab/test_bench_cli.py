"""The bench commands: what they write and print, how they refuse, and that an interrupted run goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rigs.schema import check_comparison, check_run, check_summary
from typer.testing import CliRunner

from kvedit.cli.app import app
from kvedit.lab import run

NIAH = ("niah", "--cases", "3", "--tokens", "200-260", "-a", "sur@10%", "-a", "tokens@10%", "-a", "erratum")
GEOMETRY = ("geometry", "--cases", "2", "--tokens", "200-260", "--budgets", "5%,40%")
QA = ("qa", "questions.jsonl", "--questions", "2", "--policies", "sur,oracle", "--budgets", "10%")
LOCATION = ("location", "questions.jsonl", "--questions", "1", "--policies", "sur", "--budgets", "10%")
EXECUTOR = ("executor", "--contexts", "100", "--budgets", "5%", "--rounds", "1", "--text", "text.txt")
NUMERICS = ("numerics", "--contexts", "80,120", "--cases", "2", "--text", "text.txt")
EVIDENCE = ("evidence", "questions.jsonl", "--questions", "2", "--budgets", "10%,20%")
ALL = (NIAH, GEOMETRY, QA, LOCATION, EXECUTOR, NUMERICS, EVIDENCE)


def question(name: str, dataset: str) -> dict[str, Any]:
    """A question of our own layout: two passages of evidence and five others, all of one length."""
    paragraphs = [
        {
            "title": f"Item {number}",
            "text": f"The item {number} of {name} is paid with {number * 1001 + 37}.",
            "supporting": number in (2, 5),
            "has_answer": number == 5,
        }
        for number in range(1, 8)
    ]
    return {
        "id": name,
        "dataset": dataset,
        "type": "bridge",
        "question": f"What is item 5 of {name} paid with?",
        "answers": ["5042"],
        "paragraphs": paragraphs,
    }


def write_files() -> None:
    """Write what the commands read into the working directory: questions, one of them unfit, and a text."""
    held = [question(name, dataset) for dataset in ("hotpotqa", "iirc") for name in ("one", "two")]
    bad = {**question("bad", "iirc"), "answers": [""]}
    Path("questions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in (held[0], bad, *held[1:])))
    Path("text.txt").write_text("".join(f"Row {number} costs {number * 37}.\n" for number in range(40)))


@pytest.fixture
def tiny(home: Path, checkpoints: dict[str, Path]) -> Path:
    """A working directory with the files; gives the tiny model's folder."""
    write_files()
    return checkpoints["llama"]


@pytest.fixture(scope="module", params=ALL, ids=lambda command: command[0])
def done(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], Path, Any]:
    """Each bench, run once for a person: the command, its working directory, and what it printed."""
    root = tmp_path_factory.mktemp(request.param[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("COLUMNS", "80")
        write_files()
        command = (*request.param, "--model", str(checkpoints["llama"]), "--out", "out")
        return command, root, kvedit(*command)


@pytest.fixture
def inside(
    done: tuple[tuple[str, ...], Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[str, ...], Any]:
    """A copy of that directory to work in; gives the command, and what it printed."""
    command, root, printed = done
    monkeypatch.chdir(shutil.copytree(root, tmp_path / "copy"))
    monkeypatch.setenv("COLUMNS", "80")
    return command, printed


def kvedit(*args: str | Path, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "this is a bug in kvedit" not in result.output
    assert "\x1b" not in result.output
    return result


def parsed(*args: str | Path, code: int = 0) -> dict[str, Any]:
    result = kvedit(*args, "--json", code=code)
    assert result.stdout.isascii()
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bench_writes_its_files(inside):
    command, _ = inside
    assert sorted(files(Path("out"))) == ["cases.jsonl", "config.json", "report.html", "summary.json"]
    config, records, summary = check_run(Path("out"))
    assert config["bench"] == command[0]
    assert config["model"]["name"] == command[command.index("--model") + 1]
    # Of one `late` case, all evidence stands before the edit.
    counts = {"niah": 3, "geometry": 2, "qa": 6, "location": 4, "evidence": 5, "numerics": 2 * 2 * 6}
    assert len(records) == counts.get(command[0], len(records))
    if "arms" in summary:
        assert config["arms"] == list(records[0]["arms"]) == list(summary["arms"])
        assert (config["arms"][0], config["arms"][-1]) == ("shift", "reprefill")
        assert len({record["case"] for record in records}) == summary["cases"] == len(records)


def test_a_person_gets_a_table_of_80_columns_on_stderr(inside):
    _, result = inside
    assert result.stdout == ""
    assert "The report is out/report.html." in result.stderr
    assert "…" not in result.stderr
    lines = result.stderr.splitlines()
    assert not [line for line in lines if len(line) > 80 and not line.endswith((".", "..."))]
    assert not re.search(r"\bnan\b|None", result.stderr)
    summary = json.loads(Path("out/summary.json").read_bytes())
    if "arms" in summary:
        assert set(summary["arms"]) <= {line.split()[0] for line in lines if line.strip()}


def test_a_program_gets_the_summary_as_one_object(inside):
    command, _ = inside
    _, before, _ = check_run(Path("out"))
    printed = parsed(*command)
    _, records, summary = check_run(Path("out"))
    assert Path(printed.pop("folder")) == Path("out")
    assert printed.pop("left_out", 0) == 0
    assert printed == summary
    assert len(records) == len(before)
    if "arms" in summary:  # nothing was left to do; a measurement is taken anew
        assert records == before


def test_a_report_written_again_is_the_same(inside):
    command, _ = inside
    before = files(Path("out"))
    for name in ("summary.json", "report.html"):
        os.unlink(f"out/{name}")
    printed = parsed("report", "out")
    assert files(Path("out")) == before
    assert printed == json.loads(before["summary.json"])
    check_summary(printed, command[0])
    assert "The report is out/report.html." in kvedit("report", "out").stderr


@pytest.mark.parametrize("variant", ["relabel", "derived", "injection"])
def test_every_variant_runs(tiny, variant):
    parsed(*NIAH, "--variant", variant, "--model", tiny, "-o", "out")
    config, records, _ = check_run(Path("out"))
    assert config["options"]["variant"] == variant
    assert all(record["case"].startswith(f"{variant}-test-") for record in records)


def test_policies_budgets_and_support_make_the_arms(tiny):
    options = ("--cases", "1", "--tokens", "200", "--policies", "sur, tokens", "--budgets", "5%,8t")
    parsed("niah", *options, "--support", "units", "--model", tiny, "-o", "out")
    config, records, _ = check_run(Path("out"))
    wanted = ["shift", "sur/units@5%", "tokens/units@5%", "sur/units@8t", "tokens/units@8t", "reprefill"]
    assert config["arms"] == wanted
    assert {arm["support"] for arm in records[0]["arms"].values()} == {None, "units"}
    assert config["options"]["tokens"] == [200, 200]


def test_geometry_spends_one_score_by_every_rule(tiny):
    parsed(*GEOMETRY, "--policy", "oracle", "--model", tiny, "-o", "out")
    arms = check_run(Path("out"))[0]["arms"]
    rules = ("rows", "window", "units")
    assert arms[1:-1] == [f"oracle/{rule}@{budget}" for rule in rules for budget in ("5%", "40%")]


def test_a_custom_haystack_is_a_file_or_a_folder(tiny):
    Path("hay").mkdir()
    for name in ("a", "b"):
        text = " ".join(f"The {name} of number {number} is so." for number in range(60))
        Path(f"hay/{name}.txt").write_text(text)
    for place in ("hay", "hay/a.txt"):
        out = Path(f"out-{len(place)}")
        parsed(*NIAH, "--haystack", place, "--model", tiny, "-o", out)
        assert check_run(out)[0]["options"]["haystack"] == place
    Path("hay/short.txt").write_text("Too short.")
    kvedit(*NIAH, "--haystack", "hay", "--model", tiny, "-o", "out", code=2)


def test_questions_without_a_case_are_reported_with_the_reason(inside):
    command, result = inside
    said = "Left out: 1 question, because none of its answers contains a word." in result.stderr
    assert said == ("questions.jsonl" in command)


def test_several_data_sets_are_shown_one_by_one(tiny):
    one, two = (
        "".join(
            line for line in Path("questions.jsonl").read_text().splitlines(keepends=True) if word in line
        )
        for word in ('"hotpotqa"', '"iirc"')
    )
    Path("one.jsonl").write_text(one)
    Path("two.jsonl").write_text(two)
    command = ("qa", "one.jsonl", "two.jsonl", *QA[2:])
    result = kvedit(*command, "--model", tiny, "-o", "out")
    config, records, summary = check_run(Path("out"))
    assert config["options"]["files"] == ["one.jsonl", "two.jsonl"]
    assert {name: part["cases"] for name, part in summary["datasets"].items()} == {"hotpotqa": 6, "iirc": 6}
    assert len(records) == 12
    for title in ("12 cases", "hotpotqa: 6 cases", "iirc: 6 cases"):
        assert title in result.stderr


@pytest.mark.parametrize(
    ("args", "fact", "remedy"),
    [
        (("niah", "--policies", "best"), "Unknown policy 'best'.", "units-bm25"),
        (("niah", "--policies", ","), "Unknown policy ''.", "sur"),
        (("niah", "--arm", "sur"), "'sur' is not an arm.", "sur@2%"),
        (("niah", "--arm", "best@5%"), "Unknown policy 'best'.", "sur"),
        (("niah", "--support", "lines"), "Unknown support 'lines'.", "units"),
        (("niah", "--budgets", "much"), "'much' is not a budget.", "5%"),
        (("niah", "--variant", "other"), "Unknown variant 'other'.", "relabel"),
        (("niah", "--template", "fancy"), "Unknown template 'fancy'.", "ruler"),
        (("niah", "--split", "train"), "Unknown split 'train'.", "dev"),
        (("niah", "--tokens", "10-5"), "Invalid token range '10-5'.", "1000-2000"),
        (("niah", "--tokens", "300-200"), "Invalid token range '300-200'.", "A-B"),
        (("niah", "--tokens", "-"), "Invalid token range '-'.", "A-B"),
        (("niah", "--tokens", "many"), "Invalid token range 'many'.", "A-B"),
        (("niah", "--haystack", "no.txt"), "no.txt", ""),
        (("niah", "--haystack", "empty"), "empty contains no files.", "folder of text files"),
        (("niah", "--device", "tpu"), "Unknown device 'tpu'.", "cuda"),
        (("niah", "--dtype", "int8"), "Unknown dtype 'int8'.", "bfloat16"),
        (("geometry", "--policy", "best"), "Unknown policy 'best'.", "sur"),
        (("geometry", "--tokens", "5"), "Invalid token range '5'.", "at least 200"),
        (("qa", "no.jsonl"), "no.jsonl", ""),
        (("qa", "letter.txt"), "letter.txt, line 1", "JSON"),
        (("location", "no.jsonl"), "no.jsonl", ""),
        (("evidence", "no.jsonl"), "no.jsonl", ""),
        (("evidence", "questions.jsonl", "--policies", "infoflow"), "infoflow@2%", "Leave it out."),
        (("executor", "--contexts", "abc"), "--contexts cannot be 'abc'.", "1000,2000"),
        (("executor", "--contexts", "0"), "--contexts cannot be '0'.", "1000,2000"),
        (
            ("executor", "--contexts", "10", "--text", "letter.txt"),
            "has nothing to refresh.",
            "more than 16 rows",
        ),
        (("executor", "--executors", "fast"), "Unknown executor 'fast'.", "interval"),
        (
            ("executor", "--contexts", "100", "--budgets", "5", "--text", "letter.txt"),
            "'5' is not a budget.",
            "5%",
        ),
        (("executor", "--text", "no.txt"), "no.txt", ""),
        (("numerics", "--contexts", "abc"), "--contexts cannot be 'abc'.", "1000,2000"),
        (("numerics", "--text", "letter.txt"), "The text has only", "--text"),
        (("compare", "nowhere", "nowhere"), "nowhere is not a run.", "a bench wrote"),
        (("report", "nowhere"), "nowhere is not a run.", "a bench wrote"),
        (("niah", "--out", "full"), "full is not empty and is not a run.", "empty folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_invalid_options_are_refused_with_fact_and_remedy(tiny, args, fact, remedy):
    Path("empty").mkdir()
    Path("full").mkdir()
    for name in ("full/letter.txt", "letter.txt"):
        Path(name).write_text("Dear Sir")
    before = files(Path())
    model = () if args[0] in ("compare", "report") else ("--model", tiny)
    result = kvedit(*args, *model, "--json", code=2)
    failed = json.loads(result.stdout)
    assert failed["error"]["exit_code"] == 2
    assert fact in failed["error"]["fact"]
    assert remedy in failed["error"]["remedy"]
    assert failed["error"]["remedy"].endswith(".")
    assert re.sub(r"\s+", "", f"Error: {failed['error']['fact']}") in re.sub(r"\s+", "", result.stderr)
    # What was there is as it was; a measurement that failed has left no records.
    after = files(Path())
    assert {name: after[name] for name in before} == before
    assert not any(name.endswith((".jsonl", ".html")) for name in set(after) - set(before))


def test_missing_models_and_small_contexts_have_own_exit_codes(tiny):
    kvedit(*NIAH, "--model", "no/such/model", code=4)
    kvedit(*EXECUTOR, "--contexts", "4000", "--model", tiny, code=5)


def test_a_corrected_command_can_use_the_same_folder(tiny):
    kvedit(*EXECUTOR, "--contexts", "10", "--model", tiny, "-o", "out", code=2)
    parsed(*EXECUTOR, "--model", tiny, "-o", "out")
    check_run(Path("out"))


def test_cases_that_exceed_the_context_are_reported(tiny):
    result = kvedit("niah", "--cases", "2", "--tokens", "200-2000", "-a", "sur@5%", "-m", tiny, "-o", "out")
    _, records, summary = check_run(Path("out"))
    assert len(records) == summary["cases"] == 1
    assert re.search(r"Left out: Case same-key-test-\d+ needs \d+ tokens, .* has 1024\.", result.stderr)
    assert parsed("report", "out") == summary


def test_a_run_with_other_options_is_refused_and_unchanged(tiny):
    parsed(*NIAH, "--model", tiny, "--out", "out")
    before = files(Path("out"))
    for change in (("--seed", "1"), ("-a", "replay"), ("--split", "dev"), ("--cases", "4")):
        failed = parsed(*NIAH, *change, "--model", tiny, "--out", "out", code=2)["error"]
        assert re.fullmatch(r"out contains a run with a different (arms|options)\.", failed["fact"])
        assert "--out" in failed["remedy"]
    failed = parsed(*EXECUTOR, "--model", tiny, "--out", "out", code=2)["error"]
    assert "a different arms, bench, options" in failed["fact"]
    assert files(Path("out")) == before


def test_an_interrupted_run_keeps_its_cases_and_resumes(tiny, monkeypatch):
    run_one, done = run.run_case, []

    def interrupted(*args: Any, **named: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return run_one(*args, **named)

    monkeypatch.setattr(run, "run_case", interrupted)
    command = (*NIAH, "--model", str(tiny), "--out", "out")
    result = kvedit(*command, code=130)
    assert result.stderr.splitlines()[-1].startswith("Interrupted")
    kept = Path("out/cases.jsonl").read_text()
    assert kept.count("\n") == 2
    monkeypatch.setattr(run, "run_case", run_one)
    summary = parsed(*command)
    assert summary["cases"] == 3
    check_run(Path("out"))
    assert Path("out/cases.jsonl").read_text().startswith(kept)


def test_two_runs_are_compared_case_by_case(tiny, checkpoints):
    parsed(*QA, "--model", tiny, "-o", "a")
    more = ("--questions", "1", "-a", "sur@10%", "-a", "replay")
    parsed(*QA, *more, "--model", checkpoints["qwen3"], "-o", "b")
    found = parsed("compare", "a", "b")
    check_comparison(found)
    assert found["cases"] == 3
    assert [name.rpartition("-")[0] for name in found["cases_only_in_first"]] == ["hotpotqa-two"] * 3
    assert (found["arms_only_in_first"], found["arms_only_in_second"]) == (["oracle@10%"], ["replay"])
    assert list(found["arms"]) == ["shift", "sur@10%", "reprefill"]
    assert "Only in the first run: 3 cases." in kvedit("compare", "a", "b").stderr
    by_case = [{one["case"]: one["arms"]["shift"] for one in check_run(Path(name))[1]} for name in "ab"]
    changes = [
        abs(by_case[1][case]["logp_change"]) - abs(by_case[0][case]["logp_change"]) for case in by_case[1]
    ]
    assert found["arms"]["shift"]["logp_change"]["value"] == pytest.approx(sum(changes) / 3)


def test_a_run_compared_with_itself_shows_no_difference(tiny):
    parsed(*NIAH, "--model", tiny, "-o", "a")
    found = parsed("compare", "a", "a")
    check_comparison(found)
    assert found["cases"] == 3
    for arm in found["arms"].values():
        assert (arm["em"]["value"], arm["logp_change"]["value"], arm["latency_ratio"]["value"]) == (0, 0, 1)
        assert arm["transitions"]["repaired"] == arm["transitions"]["regressed"] == 0
    shown = kvedit("compare", "a", "a").stderr
    assert "3 shared cases" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_unrelated_runs_and_measurements_are_not_compared(tiny):
    parsed(*NIAH, "--model", tiny, "-o", "a")
    parsed(*NIAH, "--split", "dev", "--model", tiny, "-o", "b")
    assert parsed("compare", "a", "b", code=2)["error"]["fact"] == "The two runs have no case in common."
    parsed(*EXECUTOR, "--model", tiny, "-o", "c")
    assert "executor" in parsed("compare", "a", "c", code=2)["error"]["fact"]


def test_a_report_of_a_damaged_run_keeps_the_old_one(tiny):
    parsed(*NIAH, "--model", tiny, "-o", "out")
    lines = Path("out/cases.jsonl").read_text().splitlines(keepends=True)
    record = json.loads(lines[1])
    del record["arms"]["sur@10%"]
    for damage, fact in (("{\n", "Line 2 of"), (f"{json.dumps(record)}\n", "lacks sur@10%")):
        Path("out/cases.jsonl").write_text("".join([lines[0], damage, *lines[2:]]))
        before = files(Path("out"))
        failed = parsed("report", "out", code=1)["error"]
        assert fact in failed["fact"]
        assert "line" in failed["remedy"]
        assert files(Path("out")) == before


def test_every_bench_says_what_it_does_with_an_example():
    shown = kvedit("--help").stdout
    for command in (*ALL, ("compare",), ("report",)):
        assert command[0] in shown
        assert f"Example: kvedit bench {command[0]}" in kvedit(command[0], "--help").stdout
