"""The three lines of docs/tasks.md: lm-evaluation-harness scores a model of ours on a local task as
the model's own logits say.
"""

import json
import os
import warnings

import torch
from forked import forked
from places import DOCS
from transformers import AutoTokenizer

import repo_interp as ri
from repo_interp.shipped import zoo_path

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
    # what was asked, then the right choice; the target stands among the words once
    for prompt, row in zip(read, rows, strict=True):
        answer = row["choices"][row["label"]]
        assert prompt.text == f"{row['question']} {answer}" and prompt.answers == (answer,)
        assert prompt.token_text is not None and prompt.generated == (len(prompt.tokens) - 1,)
        assert [prompt.token_text[place].strip() for place in prompt.spans["needle"]] == [answer]
