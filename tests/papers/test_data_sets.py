"""Data sets that cannot come with the package: their formats, spans, metrics, scores on a tiny model, and the table.

The rows are our own, in the fields that each data set's publication describes; none is copied from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch
from families import TINY
from numpy.testing import assert_allclose
from task_tokenizers import FAMILIES, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from position_papers.data_sets.answers import ANSWERS, COMPARISONS, table
from position_papers.data_sets.questions import PLAIN, REORDERED, Answers, Options
from position_papers.kit.cache import Cache
from position_papers.kit.claims import FAILS, HOLDS, UNMEASURED, judge
from position_papers.kit.experiment import run
from position_papers.kit.subjects import Given
from repo_interp.cli import score as score_command
from repo_interp.errors import InputError, Note
from repo_interp.experiments.generated_scores import generated_texts, question_scores
from repo_interp.models.checkpoints import save
from repo_interp.models.reposition import reposition
from repo_interp.run import read_run
from repo_interp.tasks import prompt_from_text
from repo_interp.tasks.data_sets import NAMES, data_set_prompts, data_set_scores, spoken
from repo_interp.tasks.data_sets.longbench import PARTS
from repo_interp.tasks.data_sets.metrics import (
    METRICS,
    choice,
    classification,
    edit_similarity,
    exact_match,
    hybrid_f1,
    rouge_l,
    token_f1,
)
from repo_interp.tasks.data_sets.question import without_middle

pytestmark = pytest.mark.filterwarnings("ignore::repo_interp.errors.Note")
BPE = tokenizer("byte_level_bpe")

TRACED = {
    "question_id": "q1",
    "question": "Which river does the oldest bridge cross?",
    "table_id": "Bridges_0",
    "answer-text": "the Calm",
    "answer-node": [["Old Bridge", [1, 0], "/wiki/Old_Bridge", "passage"], ["1511", [1, 1], None, "table"]],
    "where": "passage",
}
UNTRACED = {"question_id": "q2", "question": "When was Pier Way built?", "table_id": "Bridges_0", "answer-text": "1860"}
TABLE = {
    "title": "Bridges of a town",
    "section_title": "By age",
    "header": [["Name", []], ["Built", []]],
    "data": [
        [["Pier Way", ["/wiki/Pier_Way"]], ["1860", []]],
        [["Old Bridge", ["/wiki/Old_Bridge"]], ["1511", []]],
    ],
}
PASSAGES = {"/wiki/Pier_Way": "Pier Way is made of iron.", "/wiki/Old_Bridge": "Old Bridge crosses the Calm."}
INSIDE = {
    "question_id": "q3",
    "question": "What is Pier Way made of?",
    "table_id": "Bridges_0",
    "answer_text": "iron",
    "table": {
        "title": "Bridges of a town",
        "section_title": "By age",
        "header": ["Name", "Built"],
        "data": [
            {"value": "Pier Way", "urls": [{"url": "/wiki/Pier_Way", "summary": "Pier Way is made of iron."}]},
            {"value": "1860", "urls": []},
        ],
    },
}
PAPER = {
    "title": "Counting birds",
    "abstract": "We count birds.",
    "full_text": [
        {"section_name": "Method", "paragraphs": ["Birds are counted at dawn.", "Each one is counted once."]},
        {"section_name": "Result", "paragraphs": ["There are many."]},
    ],
    "qas": [
        {
            "question": "When are birds counted?",
            "question_id": "a",
            "answers": [
                {
                    "answer": {
                        "unanswerable": False,
                        "extractive_spans": ["at dawn"],
                        "yes_no": None,
                        "free_form_answer": "",
                        "evidence": ["Birds are counted at dawn.", "FLOAT SELECTED: Table 1: Birds"],
                    }
                },
                {
                    "answer": {
                        "unanswerable": False,
                        "extractive_spans": [],
                        "yes_no": None,
                        "free_form_answer": "Early in the day",
                        "evidence": ["Each one is counted once."],
                    }
                },
            ],
        },
        {
            "question": "Is each counted once?",
            "question_id": "b",
            "answers": [
                {
                    "answer": {
                        "unanswerable": False,
                        "extractive_spans": [],
                        "yes_no": True,
                        "free_form_answer": "",
                        "evidence": [],
                    }
                },
                {
                    "answer": {
                        "unanswerable": True,
                        "extractive_spans": [],
                        "yes_no": None,
                        "free_form_answer": "",
                        "evidence": [],
                    }
                },
            ],
        },
    ],
}
MMLU = {
    "question_id": 7,
    "question": "Two and two?",
    "options": ["three", "four", "N/A"],
    "answer": "B",
    "answer_index": 1,
    "cot_content": "",
    "category": "math",
    "src": "ours",
}
WORKED = MMLU | {
    "question": "One and one?",
    "cot_content": "A: Let's think step by step. It is four less two. The answer is (A).",
}


def long_row(**changes):
    row = {"input": "Who sleeps?", "context": "The cat sleeps. The dog runs.", "answers": ["the cat", "a cat"], "length": 6}
    return row | {"dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "x"} | changes


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def piece(prompt, span):
    return [prompt.text[start:end] for start, end in prompt.characters[span]]


@pytest.fixture
def data(tmp_path):
    """A file of each data set, by name."""
    tables = tmp_path / "hybridqa" / "WikiTables-WithLinks"
    for folder, content in (("tables_tok", TABLE), ("request_tok", PASSAGES)):
        (tables / folder).mkdir(parents=True)
        (tables / folder / "Bridges_0.json").write_text(json.dumps(content))
    hybrid = tmp_path / "hybridqa" / "dev.json"
    hybrid.write_text(json.dumps([TRACED, UNTRACED]))
    long = tmp_path / "longbench"
    long.mkdir()
    lines(long / "hotpotqa.jsonl", long_row(), long_row(input="Who runs?", answers=["the dog"]))
    report = {"dataset": "gov_report", "input": "", "context": "Costs rose. " * 60, "answers": ["Costs rose."]}
    lines(long / "gov_report.jsonl", long_row(**report), long_row(**report))
    qasper = tmp_path / "qasper.json"
    qasper.write_text(json.dumps({"1234.5678": PAPER}))
    glue = tmp_path / "dev.tsv"
    glue.write_text("sentence\tlabel\n" + "".join(f"a {word} film\t{place % 2}\n" for place, word in enumerate("abcdefgh")))
    mmlu = lines(tmp_path / "test.jsonl", WORKED, MMLU, MMLU | {"question": "Four and four?", "category": "law"})
    return {"hybridqa": hybrid, "longbench": long, "qasper": qasper, "glue": glue, "mmlu_pro": mmlu}


def test_exact_match_and_f1_see_neither_case_nor_articles_nor_punctuation():
    assert exact_match("The  Calm.", "calm") == 1 and exact_match("calmer", "calm") == 0
    assert token_f1("the old bridge", "Old Bridge, north") == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert token_f1("", "") == 0 and hybrid_f1("", "the") == 1 and hybrid_f1("", "calm") == 0
    assert METRICS["F1"]("at dawn", ["noon", "dawn"], {}) == pytest.approx(2 / 3)


def test_rouge_l_gives_the_numbers_of_the_package_that_longbench_uses():
    """Goldens from rouge 1.0.1; random texts agreed with it, too."""
    assert rouge_l("one two three four", "four three two one") == pytest.approx(0.24999999500000009, abs=1e-12)
    assert rouge_l("Costs rose. Costs rose again. Who pays", "Who pays when costs rose") == pytest.approx(
        0.5999999950000001, abs=1e-12
    )
    said, wanted = (
        "The report covers rail safety. It names three gaps.\n",
        "The report names three gaps in rail safety. Funding fell.",
    )
    assert rouge_l(said, wanted) == pytest.approx(0.699999995, abs=1e-12)
    assert rouge_l("", wanted) == rouge_l("...", wanted) == 0


def test_the_other_metrics_in_closed_form():
    assert METRICS["retrieval"]("Paragraph 3, not 4 or 3", ["Paragraph 3"], {}) == pytest.approx(2 / 3)
    assert METRICS["count"]("none", ["3"], {}) == 0
    classes = ["Date", "Other date", "City"]
    assert classification("City or Date", "City", classes) == 0.5
    assert classification("Other date", "Other date", ["date", "Other date"]) == 1, "a part of the right name does not count"
    assert classification("Date", "City", classes) == 0
    assert edit_similarity("\n# a comment\nx = 1", "x = 1") == 1 and edit_similarity("abcd", "abxy") == 0.5
    assert choice("So the answer is (C). Not A") == "C" and choice("Answer: B") == "B" and choice("A or D") == "D"
    assert choice("nothing") is None and METRICS["accuracy"]("nothing", ["x"], {"letter": "A"}) == 0
    assert METRICS["following"](" 1", ["0"], {"labels": ["0", "1"]}) == 1 and METRICS["label accuracy"](" 1", ["0"], {}) == 0


def test_what_counts_of_an_output_ends_at_the_first_stop():
    assert spoken("\n\nat dawn\nQuestion: x", {"stops": ["\n"]}) == "at dawn"
    assert spoken("so B\nQuestion: C", {"stops": ["Question:"]}) == "so B\n"
    assert spoken("a\nb", {"stops": []}) == "a\nb"


def test_hybridqa_reads_a_table_with_its_passages_and_marks_the_evidence(data):
    traced, untraced = data_set_prompts("hybridqa", data["hybridqa"], BPE)
    assert piece(traced, "needle.1") == [" 1511"] and piece(traced, "needle.2") == ["Old Bridge crosses the Calm."]
    assert piece(traced, "query.question") == [TRACED["question"]]
    assert "Name | Built\nPier Way | 1860\nOld Bridge | 1511\n\nPier Way is made of iron.\n" in traced.text
    assert traced.text.endswith("\nAnswer:") and not traced.generated and traced.answers == ("the Calm",)
    assert "needle" not in untraced.spans and traced.attributes["where"] == "passage"
    assert data_set_scores([traced, untraced], [" Calm\nmore", "1860 AD"])["exact match"].tolist() == [1, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", ["a", "5", "—", "é", " "])
def test_a_cell_of_one_character_may_be_the_answer(data, family, value):
    """Many answers are: a rank, a grade. One question that has no needle to mark refuses no file."""
    table = data["hybridqa"].parent / "WikiTables-WithLinks" / "tables_tok" / "Bridges_0.json"
    table.write_text(json.dumps(TABLE | {"data": [TABLE["data"][0], [TABLE["data"][1][0], [value, []]]]}))
    asked = TRACED | {"answer-text": "a", "answer-node": [[value, [1, 1], None, "table"]]}
    data["hybridqa"].write_text(json.dumps([asked]))
    (prompt,) = data_set_prompts("hybridqa", data["hybridqa"], tokenizer(family), answer="reference")
    assert prompt.generated and "query.question" in prompt.spans
    if value in "a5":
        assert prompt.token_text[prompt.spans["needle.1"][-1]].strip() == value


def test_hybridqa_needs_the_passages_that_its_cells_link_to(data):
    """A table alone would be asked without what most answers stand in, and score as if the model could not answer."""
    tables = data["hybridqa"].parent / "WikiTables-WithLinks"
    (tables / "request_tok" / "Bridges_0.json").unlink()
    with pytest.raises(InputError, match=r"Bridges_0\.json: the passages that its cells link to are not there; put request_tok/"):
        data_set_prompts("hybridqa", data["hybridqa"], BPE)
    unlinked = TABLE | {"data": [[["Pier Way", []], ["1860", []]]]}
    (tables / "tables_tok" / "Bridges_0.json").write_text(json.dumps(unlinked))
    assert len(data_set_prompts("hybridqa", data["hybridqa"], BPE)) == 2, "without links there is nothing to miss"
    (tables / "tables_tok" / "Bridges_0.json").write_text(json.dumps(unlinked | {"data": [{}, *unlinked["data"]]}))
    with pytest.raises(InputError, match=r"field 'data', item 1: wanted a list"):
        data_set_prompts("hybridqa", data["hybridqa"], BPE)


def test_hybridqa_with_tables_inside_the_rows(tmp_path):
    (prompt,) = data_set_prompts("hybridqa", lines(tmp_path / "rows.jsonl", INSIDE), BPE, answer="reference")
    assert "Name | Built\nPier Way | 1860\n" in prompt.text and prompt.answers == ("iron",)
    assert piece(prompt, "generated") == [" iron"] and prompt.generated[-1] == len(prompt.tokens) - 1


def test_qasper_answers_by_kind_and_evidence_of_all_annotators_is_one_needle(data):
    first, second = data_set_prompts("qasper", data["qasper"], BPE)
    assert first.answers == ("at dawn", "Early in the day") and second.answers == ("Yes", "Unanswerable")
    assert piece(first, "needle.1") == ["Birds are counted at dawn."] and piece(first, "needle.2") == [
        "Each one is counted once."
    ]
    assert "Counting birds\nWe count birds.\nMethod\nBirds are" in first.text
    assert set(first.spans) == {"context", "needle", "needle.1", "needle.2", "query", "query.question"}


def test_longbench_scores_every_set_by_its_own_metric(data):
    prompts = data_set_prompts("longbench", data["longbench"], BPE)
    assert [prompt.attributes["subset"] for prompt in prompts] == ["longbench gov_report"] * 2 + ["longbench hotpotqa"] * 2
    found = data_set_scores(prompts, ["Costs rose.", "", "the cat", "the cat"])
    assert_allclose(found["ROUGE-L"], [1, 0, np.nan, np.nan], atol=1e-7)
    assert_allclose(found["F1"], [np.nan, np.nan, 1, 0])
    assert prompts[0].attributes["new_tokens"] == 512 and prompts[2].attributes["new_tokens"] == 32


def test_longbench_marks_the_paragraph_that_is_asked_for_and_the_examples_end_at_a_line(tmp_path):
    context = "Paragraph 1: Cats.\n\nParagraph 2: Dogs run.\n\nParagraph 12: Birds."
    row = long_row(dataset="passage_retrieval_en_e", input="On dogs.", context=context, answers=["Paragraph 2"])
    (prompt,) = data_set_prompts("longbench", lines(tmp_path / "a.jsonl", row), BPE)
    assert piece(prompt, "needle") == ["Paragraph 2: Dogs run."]
    asked = long_row(dataset="trec", answers=["City"], all_classes=["City", "Date"])
    (prompt,) = data_set_prompts("longbench", lines(tmp_path / "b.jsonl", asked), BPE)
    assert data_set_scores([prompt], ["\nCity\nType: Date"])["classification"].tolist() == [1]


def test_longbench_e_is_not_mixed_with_longbench(tmp_path):
    lines(tmp_path / "hotpotqa.jsonl", long_row())
    lines(tmp_path / "hotpotqa_e.jsonl", long_row(), long_row(dataset="hotpotqa_e"))
    prompts = data_set_prompts("longbench", tmp_path, BPE)
    assert [prompt.attributes["subset"] for prompt in prompts] == ["longbench hotpotqa", *["longbench hotpotqa_e"] * 2]
    assert [prompt.attributes["metrics"] for prompt in prompts] == [["F1"]] * 3


def test_the_benchmark_s_own_wordings_are_taken_where_they_stand_beside_the_data(tmp_path):
    file = lines(tmp_path / "a.jsonl", long_row())
    assert data_set_prompts("longbench", file, BPE)[0].attributes["wording"] == "ours"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "T: {context} Q: {input} A:"}))
    (prompt,) = data_set_prompts("longbench", file, BPE)
    assert prompt.text == "T: The cat sleeps. The dog runs. Q: Who sleeps? A:" and prompt.attributes["wording"] == "LongBench's"
    assert piece(prompt, "context") == ["The cat sleeps. The dog runs."] and piece(prompt, "query") == [" Q: Who sleeps? A:"]
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "Q: {question}"}))
    with pytest.raises(InputError, match=r"field 'hotpotqa': wanted \{context\}"):
        data_set_prompts("longbench", file, BPE)


def test_mmlu_pro_shows_worked_examples_of_the_same_category_as_many_as_fit(data):
    math, law = data_set_prompts("mmlu_pro", data["mmlu_pro"], BPE, length=4096)
    assert piece(math, "examples.1.answer") == ["Answer: Let's think step by step. It is four less two. The answer is (A)."]
    assert "examples" not in law.spans and "A. three\nB. four\nAnswer:" in law.text, "N/A is no option"
    assert data_set_scores([math, law], ["The answer is (B).\nQuestion: the answer is (A)", "A"])["accuracy"].tolist() == [1, 0]
    short, _ = data_set_prompts("mmlu_pro", data["mmlu_pro"], BPE, length=2 * len(law.tokens) + 4)
    assert "examples" not in short.spans and short.attributes["dropped_tokens"] == 0


def said_of(*given, **options):
    """The Notes on the prompts of a data set."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        data_set_prompts(*given, **options)
    return [str(each.message) for each in caught]


def test_what_departs_from_the_benchmark_is_said(data, tmp_path):
    """Without a word, accuracy without examples would stand beside the benchmark's with five."""
    (said,) = said_of("mmlu_pro", data["mmlu_pro"], BPE)
    assert said.startswith(
        "2 of 2 questions of mmlu_pro are asked with fewer examples than the 5 that the benchmark shows; name a"
    )
    worked = [WORKED | {"question": f"{number} and one?"} for number in range(5)]
    assert said_of("mmlu_pro", lines(tmp_path / "all.jsonl", *worked, MMLU), BPE) == []
    assert said_of("mmlu_pro", lines(tmp_path / "all.jsonl", *worked, MMLU), BPE, length=500)[0].startswith("1 of 1")
    (said,) = said_of("longbench", data["longbench"] / "hotpotqa.jsonl", BPE)
    assert said.startswith("2 of 2 questions of longbench are asked in words of ours; put LongBench's dataset2prompt.json beside")
    (data["longbench"] / "dataset2prompt.json").write_text(json.dumps({"hotpotqa": "{context} {input}"}))
    assert said_of("longbench", data["longbench"] / "hotpotqa.jsonl", BPE) == []
    for name in ("hybridqa", "qasper", "glue"):
        assert said_of(name, data[name], BPE, length=400) == []


def test_questions_that_stand_twice_are_counted_aloud(data):
    traced = data["hybridqa"].parent / "dev.traced.json"
    traced.write_text(json.dumps([TRACED, UNTRACED | {"question": "Another?"}]))
    (said,) = said_of("hybridqa", traced.parent, BPE)
    assert said.endswith("hybridqa: 1 of 4 questions of hybridqa stand there a second time, and count again")


def test_mmlu_pro_in_a_folder_of_parquet_as_it_is_published(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    for name, row in (("test", MMLU), ("validation", WORKED)):
        parquet.write_table(table.from_pylist([row]), tmp_path / f"{name}-00000-of-00001.parquet")
    (prompt,) = data_set_prompts("mmlu_pro", tmp_path, BPE)
    assert "examples.1" in prompt.spans and prompt.attributes["letter"] == "B"


def test_glue_is_followed_when_the_output_begins_with_a_label(data):
    prompts = data_set_prompts("glue", data["glue"], BPE, length=400, count=3)
    assert len(prompts) == 3 and all(not prompt.generated and len(prompt.tokens) < 400 for prompt in prompts)
    wrong = "1" if prompts[0].answers == ("0",) else "0"
    found = data_set_scores(prompts, [f" {wrong}", f" {prompts[1].answers[0]}\n", "maybe"])
    assert found["following"].tolist() == [1, 1, 0] and found["label accuracy"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", ["none", "reference"])
def test_no_prompt_with_its_answer_is_longer_than_asked_and_the_same_seed_gives_the_same(data, name, answer):
    length = 230
    prompts = data_set_prompts(name, data[name], BPE, length, count=1, seed=3, answer=answer)
    assert prompts == data_set_prompts(name, data[name], BPE, length, count=1, seed=3, answer=answer)
    for prompt in prompts:
        assert len(prompt.tokens) - len(prompt.generated) + prompt.attributes["new_tokens"] * (answer == "none") <= length
        assert len(prompt.tokens) <= length and bool(prompt.generated) == (answer == "reference")
    assert len(prompts) == (2 if name == "longbench" else 1), "one of every part"


def test_the_middle_is_cut_and_both_ends_stay():
    text = "".join(f"{number:03} " for number in range(100))
    prompt = prompt_from_text(text, {"context": ((0, 40),), "needle": ((200, 204),), "query": ((380, 400),)}, BPE)
    for room in (20, 21):
        cut = without_middle(prompt, room)
        first = room - room // 2
        assert cut.tokens == prompt.tokens[:first] + prompt.tokens[-(room // 2) :]
        assert "needle" not in cut.spans, "a span that lost all its tokens is gone"
        assert [cut.tokens[index] for index in cut.spans["query"]] == [
            prompt.tokens[index] for index in prompt.spans["query"] if index >= len(prompt.tokens) - room // 2
        ]
        assert cut.attributes["dropped_tokens"] == len(prompt.tokens) - room and cut.token_text == tuple(
            prompt.token_text[place] for place in (*range(first), *range(len(prompt.tokens) - room // 2, len(prompt.tokens)))
        )
    assert without_middle(prompt, len(prompt.tokens)).text == text


WRONG = {
    "hybridqa": [
        ([UNTRACED | {"answer-text": 5}], r"row 1, field 'answer-text': wanted text, got 5"),
        ([{"question": "x", "table_id": "Bridges_0"}], r"row 1: there is no field 'answer-text', only question, table_id"),
        ([UNTRACED, UNTRACED | {"table_id": "Roads_0"}], r"field 'table_id': there is no table 'Roads_0'"),
        ([TRACED | {"answer-node": [["x"]]}], r"row 1, field 'answer-node', item 1: wanted \[cell"),
        ([INSIDE | {"table": INSIDE["table"] | {"header": ["a", "b", "c"]}}], r"field 'data': wanted rows of 3 cells"),
        (["text"], r"row 1: wanted an object, got"),
    ],
    "longbench": [
        ([long_row(), long_row(context="")], r"row 2, field 'context': the text is empty"),
        ([long_row(dataset="dureader")], r"row 1, field 'dataset': the Chinese set"),
        ([long_row(dataset="other")], r"row 1, field 'dataset': wanted one of narrativeqa"),
        ([long_row(answers="cat")], r"row 1, field 'answers': wanted a list, got \"cat\""),
        ([long_row(answers=["cat", 3])], r"row 1, field 'answers', item 2: wanted text, got 3"),
        ([long_row(dataset="trec")], r"row 1, field 'all_classes': wanted a list, got null"),
    ],
    "qasper": [
        ([PAPER], r"wanted an object of papers by their id"),
        ({"1": {"title": "x"}}, r"row '1': there is no field 'full_text'"),
        (
            {"1": PAPER | {"qas": [{"question": "x", "answers": []}]}},
            r"row '1', field 'qas', item 1, field 'answers': wanted at least one",
        ),
        ({"1": PAPER | {"qas": [3]}}, r"row '1', field 'qas', item 1: wanted an object, got 3"),
    ],
    "mmlu_pro": [
        ([MMLU | {"answer": "C"}], r"row 1, field 'answer': wanted the letter of one of 2 options, got 'C'"),
        ([WORKED], r"every row has a worked solution"),
        ([MMLU | {"options": "four"}], r"row 1, field 'options': wanted a list"),
    ],
}


@pytest.mark.parametrize(("name", "rows", "said"), [(name, rows, said) for name, known in WRONG.items() for rows, said in known])
def test_a_wrong_file_is_refused_in_one_line_that_names_row_and_field(data, tmp_path, name, rows, said):
    file = (data["hybridqa"].parent if name == "hybridqa" else tmp_path) / "wrong.json"
    file.write_text(json.dumps(rows))
    with pytest.raises(InputError, match=said) as refused:
        data_set_prompts(name, file, BPE)
    assert "\n" not in str(refused.value) and "wrong.json" in str(refused.value)


def test_rows_are_read_in_the_shapes_that_libraries_write_them_in(tmp_path):
    asked = [MMLU | {"question": text} for text in ("Wie groß?", "多少？", "How many\u2028lines?")]
    rows = [json.dumps(row, ensure_ascii=False) for row in asked]
    shapes = {
        "list.json": f"[{','.join(rows)}]",
        "indented.json": json.dumps(asked, indent=2),
        "lines.json": "\n".join(rows),
        "windows.jsonl": "\r\n".join(rows) + "\r\n\r\n",
        "marked.jsonl": "\ufeff" + "\n".join(rows),
    }
    texts = []
    for name, content in shapes.items():
        (tmp_path / name).write_bytes(content.encode())
        texts.append([piece(prompt, "query.question") for prompt in data_set_prompts("mmlu_pro", tmp_path / name, BPE)])
    assert all(known == texts[0] for known in texts) and len(texts[0]) == 3 and "多少？" in texts[0][1][0]


def test_files_that_are_none_are_refused(tmp_path):
    for content, said in (("{", "row 1: broken JSON"), ("", "there are no rows")):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(InputError, match=said):
            data_set_prompts("longbench", tmp_path / "a.jsonl", BPE)
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    for path, said in (
        (tmp_path / "a.parquet", "no parquet"),
        (tmp_path / "b.json", "no such file"),
        (tmp_path / "c", "no such file"),
    ):
        with pytest.raises(InputError, match=said):
            data_set_prompts("longbench", path, BPE)
    with pytest.raises(InputError, match=r"a\.parquet: wanted Qasper as it is released"):
        data_set_prompts("qasper", tmp_path / "a.parquet", BPE)
    with pytest.raises(InputError, match="one of hybridqa, longbench"):
        data_set_prompts("squad", tmp_path / "a.jsonl", BPE)
    (tmp_path / "dev.json").write_text(json.dumps([UNTRACED]))
    with pytest.raises(InputError, match="put the folder WikiTables-WithLinks"):
        data_set_prompts("hybridqa", tmp_path / "dev.json", BPE)


@pytest.mark.parametrize("said", ["Support for codec 'lzo' not built\nsecond line", ""])
def test_parquet_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, said):
    """A codec that this pyarrow was built without is its NotImplementedError."""
    parquet = pytest.importorskip("pyarrow.parquet")

    def read_table(file):
        raise NotImplementedError(said)

    monkeypatch.setattr(parquet, "read_table", read_table)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=r"a\.parquet: this is no parquet file that can be read \(") as refused:
        data_set_prompts("mmlu_pro", tmp_path / "a.parquet", BPE)
    assert "\n" not in str(refused.value)


def test_every_metric_that_a_data_set_names_is_there():
    assert {part.metric for part in PARTS.values()} <= METRICS.keys()
    assert {metric for comparison in COMPARISONS for metric in comparison.questions.metrics} <= METRICS.keys()
    assert score_command._DATA_SETS == NAMES
    assert {comparison.questions.data_set for comparison in COMPARISONS} <= set(NAMES)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random checkpoints that know BPE's tokens, by name."""
    paths = {}
    for scheme in ("rope", "repo"):
        torch.manual_seed(0)
        config = LlamaConfig(**TINY | {"vocab_size": len(BPE), "initializer_range": 0.2, "num_hidden_layers": 1})
        model = reposition(LlamaForCausalLM(config).eval(), scheme)
        paths[f"my/{scheme}"] = tmp_path_factory.mktemp("models") / scheme
        save(model, paths[f"my/{scheme}"], BPE)
    return paths


def test_answers_are_what_greedy_generation_without_a_cache_gives_up_to_the_end_of_text(data):
    torch.manual_seed(1)
    config = LlamaConfig(**TINY | {"vocab_size": len(BPE), "initializer_range": 0.2, "num_hidden_layers": 1})
    model = LlamaForCausalLM(config).eval()
    prompts = data_set_prompts("longbench", data["longbench"], BPE, 64)

    def slow(prompt):
        tokens = list(prompt.tokens)
        for _ in range(prompt.attributes["new_tokens"]):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt.tokens) :]

    with torch.inference_mode():
        made = [slow(prompt) for prompt in prompts]
    model.generation_config.eos_token_id = end = made[0][5]
    texts = generated_texts(model, BPE, prompts, batch_size=3)
    until = [row[: row.index(end)] if end in row else row for row in made]
    assert len(until[0]) <= 5 and texts == [BPE.decode(row, skip_special_tokens=True) for row in until]
    found = question_scores(model, BPE, prompts, batch_size=3)
    by_metric = data_set_scores(prompts, texts)
    assert found["test_set"].values.tolist() == ["longbench gov_report: ROUGE-L", "longbench hotpotqa: F1"]
    assert_allclose(found["mean_score"], [by_metric["ROUGE-L"][:2].mean(), by_metric["F1"][2:].mean()])
    assert found["questions"].values.tolist() == [2, 2] and found["cut"].values[0] == 1


def answered(models, data, options=None, cache=None):
    """What comes of the experiment: its figure's data, the figure, and the verdicts by claim and checkpoint."""
    options = dataclasses.replace(options or Options(), data=tuple((name, str(path)) for name, path in data.items()))
    paths = {name: str(path) for name, path in models.items()}
    (result,) = run(ANSWERS, Given(paths).subjects(), options, cache or Cache(), lambda text: None)
    (drawing,) = result.drawings
    return drawing, {(verdict.claim.label, verdict.checkpoint): verdict for verdict in result.verdicts}


def test_the_table_has_a_row_per_part_and_says_what_data_it_needs(data, models, tmp_path):
    given = {name: data[name] for name in ("hybridqa", "qasper")}
    options, cache = Options(questions=2, length=60), Cache(tmp_path / "cache")
    drawing, verdicts = answered(models, given, options, cache)
    assert drawing.data["row"].values.tolist() == [
        *("hybridqa: exact match", "hybridqa: F1 (HybridQA)", "longbench", "qasper: F1", "glue", "mmlu_pro")
    ]
    needs = dict(zip(drawing.data["row"].values, drawing.data["needs"].values, strict=True))
    assert needs["glue"] == "needs data: give --data glue=FILE" and needs["qasper: F1"] == ""
    assert np.isfinite(drawing.data["score"].sel(row="qasper: F1")).all()
    assert drawing.data["score"].sel(row="glue").isnull().all()
    assert {label for label, _ in verdicts} == {claim.label for claim in ANSWERS.claims}
    assert verdicts["H6 (few-shot)", "none"].note == "needs data: give --data glue=FILE"
    assert "longbench=FILE" in verdicts["R9 (LongBench)", "none"].note
    assert all(verdict.verdict == UNMEASURED for verdict in verdicts.values()), "random weights answer nothing"
    assert {"needs data: give --data longbench=FILE"} <= {text.get_text() for text in drawing.figure.axes[0].texts}
    assert answered(models, given, options, cache)[0].data.identical(drawing.data)
    kept = len(list((tmp_path / "cache").glob("*.nc")))
    given["qasper"].write_text(
        json.dumps({"1": PAPER | {"qas": [PAPER["qas"][0], PAPER["qas"][1] | {"question": "Is each cat counted?"}]}})
    )
    answered(models, given, options, cache)
    assert len(list((tmp_path / "cache").glob("*.nc"))) == kept + 2, "other data is measured anew"


def test_without_data_or_checkpoints_there_is_still_a_table():
    drawing, verdicts = answered({}, {})
    assert drawing.data["row"].values.tolist() == list(NAMES)
    assert all(verdict.verdict == UNMEASURED for verdict in verdicts.values())
    with pytest.raises(InputError, match="wanted a data set"):
        answered({}, {"squad": "x"})


def test_verdicts_follow_the_rules(models):
    import xarray as xr

    subjects = Given({name: str(path) for name, path in models.items()}).subjects()
    rng = np.random.default_rng(0)

    def scores(mean, metric, reordered=1.0):
        values = np.clip(rng.normal(mean, 0.02, (2, 1, 40)), 0, 1)
        values[1] = values[0] * reordered
        coords = {"order": [PLAIN, REORDERED], "test_set": ["t"], "metric": ("test_set", [metric])}
        return xr.Dataset({"score": (("order", "test_set", "prompt"), values)}, coords)

    def verdict(label, data_set, asked=subjects, **known):
        found = {(f"my/{name}", data_set): each for name, each in known.items()}
        answers = Answers(asked, Options(data=((data_set, "x"),)), found)
        (wanted,) = (claim for claim in ANSWERS.claims if claim.label == label)
        return {each.checkpoint: judge(each).verdict for each in ANSWERS.judge(answers) if each.claim is wanted}

    for repo, rope, wanted in ((0.4, 0.3, HOLDS), (0.3, 0.4, FAILS), (0.001, 0.001, UNMEASURED)):
        known = {"repo": scores(repo, "exact match"), "rope": scores(rope, "exact match")}
        assert verdict("R9 (HybridQA)", "hybridqa", **known) == {"my/repo": wanted}
        known = {"repo": scores(repo, "accuracy"), "rope": scores(rope, "accuracy")}
        assert verdict("R9 (MMLU-Pro)", "mmlu_pro", **known) == {"my/repo": wanted}
    same = scores(0.4, "accuracy")
    assert verdict("R9 (MMLU-Pro)", "mmlu_pro", repo=same, rope=same) == {"my/repo": HOLDS}, "on par is not below"
    alone = same.isel(prompt=[0])
    assert verdict("R9 (MMLU-Pro)", "mmlu_pro", repo=alone, rope=alone) == {"my/repo": UNMEASURED}, "one question has no error"
    assert verdict("R9 (HybridQA)", "hybridqa", subjects[:1]) == {"none": UNMEASURED}
    known = {"rope": scores(0.4, "F1", 0.99), "repo": scores(0.4, "F1", 0.9)}
    assert verdict("P6 (Qasper)", "qasper", **known) == {"my/rope": HOLDS, "my/repo": FAILS}


def test_the_mean_over_a_data_set_is_that_of_its_parts(models):
    """LongBench's average: two sets of 1 and 4 questions count alike, and parts of one size are taken as they are."""
    import xarray as xr

    def sample(values):
        coords = {"order": [PLAIN], "test_set": ["a", "b"], "metric": ("test_set", ["F1", "ROUGE-L"])}
        scores = xr.Dataset({"score": (("order", "test_set", "prompt"), np.array([values]))}, coords)
        (longbench,) = {each.questions for each in COMPARISONS if each.questions.data_set == "longbench"}
        return Answers((), Options(), {("my/repo", "longbench"): scores}).sample("my/repo", longbench)

    unlike = sample([[1, np.nan, np.nan, np.nan], [0, 0.5, 0, 0.5]])
    assert unlike.mean == pytest.approx((1 + 0.25) / 2) and unlike.prompts.mean() == pytest.approx(unlike.mean)
    assert unlike.count == 5
    assert sample([[1, 0], [0, 0.5]]).prompts.tolist() == [1, 0, 0, 0.5]


def test_the_table_of_nothing_says_what_it_needs(models):
    subjects = Given({name: str(path) for name, path in models.items()}).subjects()
    rows = table(Answers(subjects, Options(data=tuple((name, "x") for name in NAMES if name != "glue")), {}))
    assert rows["row"].values.tolist() == ["glue"]
    assert rows["needs"].values.tolist() == ["needs data: give --data glue=FILE"]
    assert rows["checkpoint"].values.tolist() == list(models)


def command(*words):
    parser = argparse.ArgumentParser()
    score_command.add_arguments(parser)
    return score_command.run(parser.parse_args(words))


def test_score_takes_a_data_set_with_its_file(data, models, tmp_path, capsys):
    out = tmp_path / "out"
    words = (str(models["my/repo"]), "qasper", "--data", str(data["qasper"]), "--count", "2", "--length", "48", "--out", str(out))
    assert command(*words) == 0
    assert "qasper: F1" in capsys.readouterr().out
    scores = read_run(out / "run.nc")["scores"]
    assert scores["score"].shape == (1, 2) and scores.attrs["task"] == "qasper" and float(scores["cut"][0]) == 1


def test_a_folder_of_data_is_told_apart_by_what_is_in_it(data, models, tmp_path):
    """Found: of a file the content was compared, of a folder its name alone."""
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / data["qasper"].name
    file.write_bytes(data["qasper"].read_bytes())
    words = (
        str(models["my/repo"]),
        "qasper",
        "--data",
        str(folder),
        "--count",
        "2",
        "--length",
        "48",
        "--out",
        str(tmp_path / "out"),
    )
    assert command(*words) == 0 and command(*words, "--resume") == 0
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"--data was another file or folder \([0-9a-f]{12}\.\.\.\), now another"):
        command(*words, "--resume")


def test_score_says_which_option_wants_another(data, models):
    name = str(models["my/repo"])
    for words, said in (
        (("qasper",), "qasper needs data, which cannot come with the package; give your copy: --data FILE"),
        (("niah", "--data", "x"), "--data is for a data set"),
        (("niah", "--length", "8"), "--length is for data sets"),
        (("qasper", "--data", "x", "--task-size", "small"), "--task-size is for tasks"),
    ):
        with pytest.raises(InputError, match=said):
            command(name, *words)
