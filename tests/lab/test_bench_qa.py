"""Answer scoring, question files, and the cases made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvedit.errors import UsageError
from kvedit.lab import location, qa
from kvedit.lab.questions import Passage, Question
from kvedit.lab.scoring import DATASETS, exact_match, f1, holds, normalise
from kvedit.text.document import Document

NATURAL = ["hotpotqa", "2wikimultihopqa", "musique", "iirc"]

# --- scoring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["hotpotqa", "2wikimultihopqa", "musique"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Game  of\nThrones!", "game of thrones"),
        ("An apple a day", "apple day"),
        ("U.S.-led", "usled"),
        ("Theatre", "theatre"),
        ("the", ""),
        ("Fårö", "fårö"),
    ],
)
def test_squad_rules_drop_case_punctuation_articles_and_spaces(dataset, text, words):
    assert normalise(text, dataset) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("7", "7.0"),
        ("7.0", "7.0"),
        ("7,000 men", "7000.0 men"),
        ("3.5%", "35.0"),  # "3.5%" is no number, so its punctuation goes, and then it is one
        ("$5", "5.0"),
        ("the Anglo-Saxon", "anglo saxon"),
        ("1914-18", "1914.0 18.0"),
        ("None", "none"),
    ],
)
def test_iirc_reads_numbers_and_parts_words_at_hyphens(text, words):
    assert normalise(text, "iirc") == words


def test_exact_match_accepts_any_answer_without_extra_words():
    assert exact_match("Caspian sea.", ["the north", "Caspian Sea"], "musique")
    assert not exact_match("Caspian Sea, in the north", ["Caspian Sea"], "musique")
    assert not exact_match("", ["Caspian Sea"], "musique")
    assert exact_match("42.0", ["42"], "iirc")
    assert not exact_match("42.0", ["42"], "hotpotqa")
    assert not exact_match("5 years", ["5"], "iirc")


def test_f1_counts_shared_words_with_repeats():
    # 2 of 3 words of the output, 2 of 2 of the answer
    assert f1("new york city", ["New York"], "hotpotqa") == pytest.approx(0.8)
    # "ha" is shared twice: 2 of 3, and 2 of 2
    assert f1("ha ha ha", ["ha ha"], "musique") == pytest.approx(0.8)
    # as sets, 1 of 1 and 1 of 1
    assert f1("ha ha ha", ["ha ha"], "iirc") == 1.0
    # 1 of 3 and 1 of 1, in two decimals
    assert f1("in york today", ["York"], "iirc") == 0.5
    assert f1("york is a city", ["York", "a city"], "2wikimultihopqa") == pytest.approx(0.5)


def test_yes_and_no_give_partial_f1_only_in_musique():
    for dataset in ("hotpotqa", "2wikimultihopqa"):
        assert f1("yes they are", ["yes"], dataset) == 0.0
        assert f1("no", ["no smoking"], dataset) == 0.0
        assert f1("Yes.", ["yes"], dataset) == 1.0
    assert f1("yes they are", ["yes"], "musique") == pytest.approx(0.5)


def test_two_sides_without_words_agree_where_the_script_says_so():
    assert f1("the", ["a"], "musique") == f1("the", ["a"], "iirc") == 1.0
    assert f1("the", ["a"], "hotpotqa") == f1("the", ["a"], "2wikimultihopqa") == 0.0
    assert f1("", ["word"], "musique") == f1("", ["word"], "iirc") == f1("", ["word"], "hotpotqa") == 0.0


def test_iirc_gives_no_f1_without_a_number_of_the_answer():
    assert f1("6 years", ["5 years"], "iirc") == 0.0
    # 1 of 2 and 1 of 1
    assert f1("5 years", ["5"], "iirc") == 0.67
    # the output may say a number more
    assert f1("5 of 9 years", ["5 years"], "iirc") == 0.67


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The code is 4471.", "4471", True),
        (" 4,471, as said before", "4471", True),
        ("7120, not 4471", "4471", False),
        ("44710", "4471", False),
        ("no number", "4471", False),
        ("Amber-Anchor.", "amber-anchor", True),
        ("'crimson' is the word", "Crimson", True),
        ("it is crimson", "crimson", False),
        ("dark red, they say", "dark red", True),
        ("", "crimson", False),
    ],
)
def test_niah_reads_the_first_number_or_the_first_words(text, answer, right):
    assert exact_match(text, [answer], "niah") is right
    assert f1(text, [answer], "niah") == float(right)


def test_an_answer_is_matched_as_whole_words():
    assert holds("He was born in Green Bay, Wisconsin", ["Milwaukee", "green bay"], "musique")
    assert not holds("He was born in Evergreen Bayou", ["green bay"], "musique")
    assert not holds("anything", ["the"], "musique")


def test_an_unknown_data_set_is_refused():
    with pytest.raises(UsageError, match="Unknown data set 'squad'"):
        exact_match("a", ["a"], "squad")
    assert {normalise("Word", dataset) for dataset in DATASETS} == {"word"}


# --- reading -----------------------------------------------------------------------------------

HOTPOT: dict[str, Any] = {
    "_id": "5a8b",
    "type": "bridge",
    "level": "hard",
    "question": "Where was the painter of Night born?",
    "answer": "Arles",
    "supporting_facts": [["Night", 0], ["Ann Roe", 1]],
    "context": [
        ["Night", ["Night is a painting. ", "It is by Ann Roe."]],
        ["Day", ["Day is a film."]],
        ["Ann Roe", ["Ann Roe paints.", " She was born in Arles."]],
        ["Arles", ["Arles is a town."]],
        ["Dusk", ["Dusk is  a\nband."]],
    ],
}
MUSIQUE: dict[str, Any] = {
    "id": "2hop__1_2",
    "question": "Where was the painter of Night born?",
    "question_decomposition": [],
    "answer": "Arles",
    "answer_aliases": ["Arles, France"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Night", "paragraph_text": "It is by Ann Roe.", "is_supporting": True},
        {"idx": 1, "title": "Day", "paragraph_text": "Day is a film.", "is_supporting": False},
        {"idx": 2, "title": "Ann Roe", "paragraph_text": "Born in Arles.", "is_supporting": True},
        {"idx": 3, "title": "Town", "paragraph_text": "A town near Arles.", "is_supporting": False},
    ],
}
OWN: dict[str, Any] = {
    "id": "x1",
    "dataset": "hotpotqa",
    "type": "comparison",
    "question": "Are both towns?",
    "answers": ["yes"],
    "paragraphs": [
        {"title": name, "text": f"{name} says yes.", "supporting": name in "AB", "has_answer": True}
        for name in "ABCDE"
    ],
}


def iirc_article(number: int, questions: list[dict[str, Any]]) -> dict[str, Any]:
    text = f"Article {number} is about matter {number}."
    return {
        "pid": f"p{number}",
        "title": f"Title {number}",
        "text": text,
        "links": [],
        "questions": questions,
    }


def iirc_question(qid: str, answer: dict[str, Any], *links: str) -> dict[str, Any]:
    context = [{"passage": "main", "text": "Article", "indices": [0, 7]}]
    context += [{"passage": link, "text": f"All of {link}.", "indices": [0, 1]} for link in links]
    return {"qid": qid, "question": f"What of {qid}?", "answer": answer, "context": context}


IIRC: list[dict[str, Any]] = [
    iirc_article(
        0,
        [
            iirc_question("q0", {"type": "value", "answer_value": "5", "answer_unit": "years"}, "Oak", "Elm"),
            iirc_question("q1", {"type": "span", "answer_spans": [{"text": "Elm", "passage": "Elm"}]}, "Elm"),
            iirc_question("q2", {"type": "none"}),
            iirc_question("q3", {"type": "binary", "answer_value": "yes"}, "Ash"),
            iirc_question("q4", {"type": "span", "answer_spans": [{"text": "Ash"}, {"text": "Elm"}]}, "Ash"),
        ],
    ),
    *(iirc_article(number, []) for number in range(1, 10)),
]


def write(path: Path, records: list[Any], lines: bool = False) -> Path:
    text = "".join(json.dumps(one) + "\n" for one in records) if lines else json.dumps(records, indent=1)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("dataset", "more"), [("hotpotqa", {}), ("2wikimultihopqa", {"evidences": []})])
def test_hotpotqa_and_2wiki_are_read_with_evidence_by_title(tmp_path, dataset, more):
    (question,) = qa.read(write(tmp_path / "dev.json", [{**HOTPOT, **more}]))
    assert (question.name, question.type, question.answers) == (f"{dataset}-5a8b", "bridge", ("Arles",))
    assert [passage.supporting for passage in question.passages] == [True, False, True, False, False]
    assert [passage.has_answer for passage in question.passages] == [False, False, True, True, False]
    assert question.passages[2].text == "Ann Roe paints. She was born in Arles."
    assert question.passages[4].block == "Dusk\nDusk is a band.\n"
    assert question.deletable == [1, 4]
    assert qa.unfit(question) is None


def test_musique_is_read_with_its_aliases(tmp_path):
    (question,) = qa.read(write(tmp_path / "dev.jsonl", [MUSIQUE], lines=True))
    assert (question.name, question.type) == ("musique-2hop__1_2", "2hop")
    assert question.answers == ("Arles", "Arles, France")
    assert question.deletable == [1]


def test_own_lines_keep_their_marks_and_yes_is_in_no_passage(tmp_path):
    (question,) = qa.read(write(tmp_path / "own.jsonl", [OWN], lines=True))
    assert [passage.has_answer for passage in question.passages] == [True] * 5
    assert question.deletable == [2, 3, 4]
    assert replace(question, answers=("yes", "town")).deletable == []


def test_an_id_that_names_its_data_set_does_so_once_in_the_name(tmp_path):
    record = {**OWN, "id": "iirc-dev-7", "dataset": "iirc"}
    assert qa.read(write(tmp_path / "own.jsonl", [record], lines=True))[0].name == "iirc-dev-7"


def test_iirc_articles_become_contexts_of_eight(tmp_path):
    questions = qa.read(write(tmp_path / "dev.json", IIRC))
    assert [question.id for question in questions] == ["q0", "q1", "q2", "q3", "q4"]
    assert questions[0].answers == ("5", "5 years")
    assert questions[3].answers == ("yes",)
    first = {passage.title: passage for passage in questions[0].passages}
    # its article, two links of its own, one of a sibling, and four other articles
    assert sorted(first) == ["Ash", "Elm", "Oak", *(f"Title {number}" for number in range(5))]
    assert {title for title, passage in first.items() if passage.supporting} == {"Title 0", "Oak", "Elm"}
    assert first["Ash"].text == "All of Ash."
    _, left_out = qa.sift(questions)
    assert left_out == {"iirc-q2": "it is unanswerable", "iirc-q4": "its answer is several spans"}
    assert qa.read(tmp_path / "dev.json") == questions


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ('{"id": 1}\n{"id" 2}\n', "bad.jsonl, line 1: 'paragraphs' is missing or not a list"),
        (
            json.dumps(OWN) + '\n\n{"id" 2}\n',
            "bad.jsonl, line 3: invalid JSON: Expecting ':' delimiter, column 7",
        ),
        ('[\n{"_id": "1",}\n]', "bad.jsonl, line 2: invalid JSON"),
        ("[]", "bad.jsonl contains no questions"),
        ("   \n", "bad.jsonl contains no questions"),
        ("", "bad.jsonl is empty"),
        ("[1]", "bad.jsonl, record 1: an object was expected"),
        ("[[1]]", "bad.jsonl, record 1: an object was expected"),
        ("7\n", "bad.jsonl, line 1: an object was expected"),
        (
            json.dumps([HOTPOT, {**HOTPOT, "_id": "2", "answer": None}]),
            "record 2: 'answer' is missing or not a string",
        ),
        (json.dumps([{**HOTPOT, "context": [["Night"]]}]), "record 1: 'supporting_facts' or 'context' is no"),
        (json.dumps([{**HOTPOT, "supporting_facts": [[[], 1]]}]), "'supporting_facts' or 'context' is no"),
        (json.dumps([{**HOTPOT, "context": [["Night", [1]]]}]), "record 1: a passage of 'context' contains"),
        (json.dumps([{**HOTPOT, "context": [["", [" "]]]}]), "record 1: a passage is empty"),
        (json.dumps({**OWN, "dataset": "squad"}), "line 1: the data set 'squad' is not one of hotpotqa"),
        (json.dumps({**OWN, "answers": [1]}), "line 1: 'answers' contains something that is not a string"),
        (json.dumps({**MUSIQUE, "answer_aliases": "x"}), "line 1: 'answer_aliases' is missing or not a list"),
        (json.dumps([HOTPOT, HOTPOT]), "contains the question 5a8b twice"),
        (json.dumps([{"questions": [{}], "text": "A"}]), "article 1: 'context' is missing or not a list"),
        (json.dumps([{"questions": 3, "text": "A"}]), "article 1: 'questions' is missing or not a list"),
    ],
)
def test_a_bad_file_is_refused_with_its_location(tmp_path, text, fact):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UsageError) as caught:
        qa.read(tmp_path / "bad.jsonl")
    assert fact in caught.value.fact
    assert caught.value.remedy.endswith(".")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        qa.read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"answers": ()}, "none of its answers contains a word"),
        ({"answers": ("The!",)}, "none of its answers contains a word"),
        ({"flaw": "it is unanswerable"}, "it is unanswerable"),
        ({"passages": (Passage("A", "a", False, False),) * 4}, "no passage is marked as evidence"),
        (
            {"passages": (Passage("A", "a", True, False), *(Passage("B", "b", False, True),) * 3)},
            "every passage is evidence or contains the answer",
        ),
        (
            {"passages": (Passage("A", "a", True, False), *(Passage("B", "b", False, False),) * 2)},
            "it has fewer than four passages",
        ),
    ],
)
def test_an_unusable_question_is_returned_with_its_reason(change, reason):
    good = synthetic("good", 8)
    bad = replace(synthetic("bad", 8), **change)
    assert qa.sift([bad, good]) == ([good], {"hotpotqa-bad": reason})
    with pytest.raises(UsageError, match=r"hotpotqa-bad does not qualify: .*sift"):
        list(qa.cases([good, bad]))


def test_missing_evidence_and_unanswerable_twins_are_flaws(tmp_path):
    lacking = {**HOTPOT, "supporting_facts": [["Noon", 0]]}
    (question,) = qa.read(write(tmp_path / "a.json", [lacking]))
    assert qa.unfit(question) == "its context lacks a passage of the evidence"
    twins = qa.read(write(tmp_path / "b.jsonl", [MUSIQUE, {**MUSIQUE, "answerable": False}], lines=True))
    assert [qa.unfit(twin) for twin in twins] == [None, "it is unanswerable"]


# --- placements --------------------------------------------------------------------------------


def synthetic(name: str, count: int, supporting: tuple[int, ...] = (1, 4), holding: int = 2) -> Question:
    """A question with passages of different lengths; one holds the answer without being evidence."""
    passages = tuple(
        Passage(
            f"Title {index}",
            " ".join([f"Passage {index} of {name}."] * (1 + (index * 7) % 4)),
            index in supporting,
            index == holding,
        )
        for index in range(count)
    )
    return Question(name, "hotpotqa", "bridge", f"What of {name}?", ("Arles",), passages)


def edited(case: Any) -> str:
    return Document(case.text).apply(case.edits).text


def slow_text(passages: list[Passage]) -> str:
    """The layout, written down again: two lines, and a blank one between."""
    return "\n\n".join(f"{passage.title}\n{passage.text}" for passage in passages) + "\n"


@pytest.mark.parametrize("count", [4, 5, 6, 7, 10, 20])
@pytest.mark.parametrize("seed", range(4))
def test_three_placements_delete_the_same_passage(count, seed):
    question = synthetic("q", count, supporting=(1,))
    made = list(qa.cases([question], seed=seed))
    assert [case.name for case in made] == [f"hotpotqa-q-{one}" for one in ("early", "middle", "late")]
    assert {case.source for case in made} == {"hotpotqa-q"}
    removed = {case.text[case.edits[0].start : case.edits[0].stop] for case in made}
    assert len(removed) == 1
    block = removed.pop()
    (index,) = [i for i, passage in enumerate(question.passages) if f"{passage.block}\n" == block]
    assert index in question.deletable
    others = [passage for passage in question.passages if passage != question.passages[index]]
    assert {edited(case) for case in made} == {slow_text(others)}
    for case, place in zip(made, (0, (count - 1) // 2, (count - 1) * 3 // 4), strict=True):
        assert case.text == slow_text([*others[:place], question.passages[index], *others[place:]])
        assert case.edits[0].text == ""
    assert len({case.edits[0].start for case in made}) == 3
    assert made[-1].edits[0].stop < len(made[-1].text)


def test_gold_spans_are_the_supporting_passages():
    question = synthetic("q", 9)
    wanted = [question.passages[index] for index in (1, 4)]
    for case in (*qa.cases([question]), *location.cases([question])):
        after = edited(case)
        assert [after[start:stop] for start, stop in case.gold] == [
            f"{passage.title}\n{passage.text}" for passage in wanted
        ]


def test_an_edit_takes_whole_lines():
    for case in qa.cases([synthetic("q", 9)]):
        document = Document(case.text)
        edit = case.edits[0]
        assert {edit.start, edit.stop} <= set(document.line_starts)
        assert case.text[: edit.start].endswith("\n\n") or edit.start == 0
        assert case.text[edit.stop - 2 : edit.stop] == "\n\n"


def test_a_passage_without_a_title_is_one_line():
    question = synthetic("q", 6, supporting=(1,))
    plain = replace(question, passages=tuple(replace(one, title="") for one in question.passages))
    case = next(qa.cases([plain]))
    assert edited(case).split("\n\n")[-1].count("\n") == 1
    assert "\n\n\n" not in case.text
    assert edited(case)[slice(*case.gold[0])] == plain.passages[1].text


def test_a_case_asks_for_a_short_answer_and_carries_its_facts():
    case = next(qa.cases([synthetic("q", 9)]))
    assert case.question == "What of q? Answer with a few words only."
    assert (case.answers, case.dataset, case.stale) == (("Arles",), "hotpotqa", None)
    assert case.facts == {"placement": "early", "type": "bridge", "set": "hotpotqa"}


def test_cases_depend_only_on_seed_and_question():
    questions = [synthetic(f"q{number}", 10) for number in range(20)]
    made = list(qa.cases(questions, seed=1))
    assert made == list(qa.cases(iter(questions), seed=1))
    assert made[:12] == list(qa.cases(questions, seed=1, limit=4))
    assert made[-3:] == list(qa.cases(questions[-1:], seed=1))
    assert [case.source for case in made[::3]] == [question.name for question in questions]
    drawn = [[qa.draws(question, seed)[0] for question in questions] for seed in range(3)]
    assert drawn[0] != drawn[1] != drawn[2]
    assert {index for row in drawn for index in row} == {0, 3, 5, 6, 7, 8, 9}


# --- location ----------------------------------------------------------------------------------


def test_evidence_and_distractors_swap_around_the_deletion():
    question = synthetic("q", 12)
    made = {(case.facts["side"], case.facts["tail"]): case for case in location.cases([question])}
    assert [case.name.removeprefix("hotpotqa-q-") for case in made.values()] == [
        "before-short", "after-short", "before-long", "after-long",
    ]  # fmt: skip
    blocks = {key: case.text.removesuffix("\n").split("\n\n") for key, case in made.items()}
    evidence = [question.passages[index].block.removesuffix("\n") for index in (1, 4)]
    before, after = blocks["before", "short"], blocks["after", "short"]
    removed, distractors = before[2], before[3:]
    assert before == [*evidence, removed, *distractors]
    assert after == [*distractors, removed, *evidence]
    filler = blocks["before", "long"][len(before) :]
    assert filler
    assert blocks["before", "long"] == [*before, *filler]
    assert blocks["after", "long"] == [*after, *filler]
    for key, case in made.items():
        assert case.text[case.edits[0].start : case.edits[0].stop] == f"{removed}\n\n"
        assert edited(case).split("\n\n") == [
            one if one != blocks[key][-1] else f"{one}\n" for one in blocks[key] if one != removed
        ]
    # whatever holds the answer without being evidence is in none
    assert not any("Title 2\n" in case.text for case in made.values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [7, 9, 12])
def test_distractors_match_the_evidence_length_best(count, seed):
    question = synthetic("q", count)
    evidence = sum(len(question.passages[index].block) + 1 for index in (1, 4))
    best = {}
    for removed in qa.draws(question, seed):
        rest = [index for index in question.deletable if index != removed]
        sizes = (
            sum(len(question.passages[index].block) + 1 for index in chosen)
            for number in range(1, len(rest))
            for chosen in combinations(rest, number)
        )
        best[removed] = min(abs(size - evidence) for size in sizes)
    matching = [removed for removed, off in best.items() if off <= 0.1 * evidence]
    if not matching:
        assert location.unfit(question) is not None
        return
    made = list(location.cases([question], seed=seed))
    first = question.passages[matching[0]]
    for case in made:
        assert case.text[case.edits[0].start : case.edits[0].stop] == f"{first.block}\n"
    before, after = made[:2]
    off = (len(before.text) - before.edits[0].stop) - (len(after.text) - after.edits[0].stop)
    assert abs(off) == best[matching[0]]
    assert before.facts["mismatch"] == round(off / evidence, 3)


def test_location_cases_leave_out_questions_without_a_match():
    question = synthetic("q", 8)
    long = replace(question.passages[1], text="Evidence. " * 200)
    bad = replace(question, passages=(question.passages[0], long, *question.passages[2:]))
    assert qa.unfit(bad) is None
    fit, left_out = qa.sift([bad], location.unfit)
    assert (fit, list(left_out)) == ([], ["hotpotqa-q"])
    with pytest.raises(UsageError, match="no distractors match the length"):
        list(location.cases([bad]))


# --- the evaluation's files --------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize("dataset", NATURAL)
def test_nearly_all_questions_of_the_evaluation_qualify(haystack, dataset):
    questions = qa.read(haystack.parent / f"{dataset}.jsonl")
    fit, left_out = qa.sift(questions)
    assert len(questions) == len(fit) + len(left_out) == 100
    assert len(fit) >= 90
    sources: dict[str, set[str]] = {}
    for case in qa.cases(fit):
        sources.setdefault(case.source, set()).add(edited(case))
        assert all(start < stop for start, stop in case.gold)
    assert len(sources) == len(fit)
    assert all(len(texts) == 1 for texts in sources.values())


@pytest.mark.shared
@pytest.mark.parametrize("dataset", NATURAL)
def test_most_questions_of_the_evaluation_have_an_exchange(haystack, dataset):
    fit, _ = qa.sift(qa.read(haystack.parent / f"{dataset}.jsonl"), location.unfit)
    assert len(fit) >= 60
    assert all(abs(case.facts["mismatch"]) <= 0.1 for case in location.cases(fit))
