"""The three lines of docs/tasks.md: lm-evaluation-harness scores a model of ours on a local task as
the model's own logits say.
"""

import json
import os
import warnings
from functools import partial

import torch
from forked import forked
from places import DOCS
from transformers import AutoTokenizer

import repo_interp as ri
from repo_interp.checkpoint_files.shipped import zoo_path

CHECKPOINT = str(zoo_path("reversal/repo"))
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PROGRAM = """
import json
import repo_interp as ri
from lm_eval.tasks import TaskManager
%s
from lm_eval.loggers import EvaluationTracker
tracker = EvaluationTracker(output_path="logs")
tracker.general_config_tracker.model_name_sanitized, tracker.date_id = "ours", "today"  # else set beside aggregated results
tracker.save_results_samples("words", results["samples"]["words"])
print(json.dumps(results["results"]["words"]["acc,none"]))
"""


def documented():
    """The lines of the documentation, for our checkpoint and a task of this folder."""
    _, _, text = (DOCS / "tasks.md").read_text(encoding="utf-8").partition("## Evaluation sets")
    lines = text.split("```python\n")[1].split("```")[0]
    assert '"CHECKPOINT"' in lines and 'tasks=["glue"]' in lines
    here = (
        'tasks=["words"], task_manager=TaskManager(include_path=".", '
        "include_defaults=False), bootstrap_iters=0"
    )
    return lines.replace('"CHECKPOINT"', repr(CHECKPOINT)).replace('tasks=["glue"]', here)


def test_the_harness_scores_a_model_of_ours(tmp_path):
    prompts = ri.tasks.make_task("reversal").prompts(8, test_set="3")
    tokenizer, model = AutoTokenizer.from_pretrained(CHECKPOINT), ri.load_model(CHECKPOINT)
    rows, right = [], []
    for number, prompt in enumerate(prompts):
        words = [tokenizer.decode([token]) for token in prompt.tokens]
        # without the BOS, which the tokenizer puts there itself
        *question, first, _, last = words[1:]
        wanted = number % 2  # half of the labels are wrong, so that the accuracy is neither 0 nor 1
        rows.append({"question": " ".join(question), "choices": [first, last], "label": wanted})
        with torch.no_grad():
            logits = model(torch.tensor([prompt.tokens[:-3]])).logits[0, -1]
        choices = [tokenizer.convert_tokens_to_ids(word) for word in (first, last)]
        right.append(int(logits[choices].argmax()) == wanted)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "words.yaml").write_text(TASK % json.dumps(str(tmp_path / "rows.jsonl")))

    def harness():
        warnings.simplefilter("ignore")
        os.environ.update(
            {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
        )
        exec(PROGRAM % documented(), {})

    done = forked(harness, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == sum(right) / len(right)
    assert 0 < sum(right) < len(right)
    (logged,) = (tmp_path / "logs").rglob("samples_words_*.jsonl")
    read = ri.read_prompts(logged, tokenizer)
    assert [prompt.attributes["scores"] == {"acc": 1.0} for prompt in read] == right
    # what was asked, then the right choice
    for prompt, row in zip(read, rows, strict=True):
        answer = row["choices"][row["label"]]
        assert prompt.text == f"{row['question']} {answer}" and prompt.answers == (answer,)
        assert prompt.generated == (len(prompt.tokens) - 1,)
        assert [prompt.token_text[place].strip() for place in prompt.spans["needle"]] == [answer]


GENERATION = """
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" the"], max_gen_toks: 5}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_documents_that_generate_are_scored_as_the_harness_scores_them(tmp_path):
    """Answers beside a greedy loop, up to the stop text; one right, one wrong; spans of targets."""
    bridge = ri.load("language/rope")
    questions, answers = ["def add(a, b):\n    return", "import numpy\nimport"], []
    tokens = [bridge.tokenizer(question).input_ids for question in questions]
    for question in tokens:
        made = bridge.original_model.generate(
            torch.tensor([question]), max_new_tokens=5, do_sample=False
        )
        answers.append(bridge.tokenizer.decode(made[0, len(question) :]).split(" the")[0])
    assert answers[1].strip() != "numpy"
    rows = [
        {"question": question, "answer": answer}
        for question, answer in zip(questions, (answers[0], "numpy"), strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "task.yaml").write_text(GENERATION % json.dumps(str(tmp_path / "rows.jsonl")))

    def scored():
        warnings.simplefilter("ignore")
        os.environ.update({"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")})
        from lm_eval.tasks import TaskManager, get_task_dict

        from repo_interp.analysis.score import score_harness

        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        task = get_task_dict(["counting"], manager)["counting"]
        run = score_harness(bridge, task, count=2, store=tmp_path / "kept")
        prompts = ri.tasks.harness_prompts(bridge.tokenizer, task, count=2)
        assert run["scores"]["score"].values.tolist() == [[1.0, 0.0]]
        assert run["scores"].attrs["metric"] == "exact_match"
        assert "counting of lm-evaluation-harness" in run.attrs["prompts_from"]
        assert [[*prompt.tokens] for prompt in prompts] == tokens
        needle = "".join(prompts[1].token_text[place] for place in prompts[1].spans["needle"])
        assert needle.strip() == "numpy"

    done = forked(scored, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_refuses_what_the_harness_cannot_make(tmp_path, capsys, monkeypatch):
    import lm_eval.tasks

    from repo_interp.cli import main

    # reading the harness' thousands of tasks takes longer than all else here
    few = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
    for task, options, words in (
        ("no_such_task", (), "lm-eval has no task 'no_such_task'"),
        ("ruler_vt", ("--test-sets", "512"), "1024 tokens or more, not 512"),
        ("ruler_vt", ("--answers", "forced"), "always generated"),
        ("ruler_vt", ("--set", "a=1"), "takes no --set"),
        ("ruler_vt", ("--test-sets", "long"), "lengths in tokens"),
    ):
        out = tmp_path / "out"
        assert main(["score", CHECKPOINT, f"lm-eval:{task}", "--out", str(out), *options]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
        assert not out.exists()
