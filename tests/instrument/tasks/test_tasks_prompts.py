"""Prompts and prompts.jsonl: what comes back is what was written; what is broken is refused in one
line that says where.
"""

import copy
import hashlib
import json
import zipfile

import pytest
from task_tokenizers import FAMILIES, tokenizer

from repo_interp.errors import InputError, Note
from repo_interp.tasks import Prompt, digest, niah, prompt_from_text, read_prompts, write_prompts

TEXT = (
    "The grass is green. One of the special magic numbers for naïve-café is: 7654321. "
    "What is it? 7654321"
)
CHARACTERS = {
    "needle": ((20, 80),),
    "needle.1": ((20, 80),),
    "needle.1.value": ((72, 79),),
    "query": ((81, 92),),
    "generated": ((93, 100),),
}


def the_prompt(family="byte_level_bpe"):
    return prompt_from_text(
        TEXT, CHARACTERS, tokenizer(family), ["7654321"], {"depth": 12.5, "list": [1, None]}
    )


def test_rest_is_what_is_not_named():
    prompt = Prompt(
        tokens=(5, 6, 7, 8, 9), spans={"needle": (1,), "needle.1": (1,)}, generated=(4,)
    )
    assert prompt.all_spans() == {
        "needle": (1,),
        "needle.1": (1,),
        "rest": (0, 2, 3),
        "generated": (4,),
    }


def test_top_level_spans_rest_and_generated_are_a_partition():
    prompt = the_prompt()
    top = [places for name, places in prompt.all_spans().items() if "." not in name]
    assert sorted(index for places in top for index in places) == list(range(len(prompt.tokens)))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_round_trip(tmp_path, family):
    prompts = [the_prompt(family), *niah(tokenizer(family), "multivalue", 700, 2)]
    write_prompts(prompts, tmp_path / "prompts.jsonl")
    assert read_prompts(tmp_path / "prompts.jsonl", tokenizer(family)) == prompts
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_the_file_is_as_documented(tmp_path):
    write_prompts(
        [the_prompt(), Prompt(tokens=(3, 4), spans={"needle": (0,)}, generated=(1,))],
        tmp_path / "p.jsonl",
    )
    first, second = map(json.loads, (tmp_path / "p.jsonl").read_text("utf-8").splitlines())
    assert first["text"] == TEXT
    assert first["spans"]["needle"] == [[20, 80]]
    assert first["generated"] == [[93, 100]]
    assert second == {"tokens": [3, 4], "spans": {"needle": [0]}, "generated": [1]}


def test_a_tokenizer_names_the_tokens_of_a_token_prompt(tmp_path):
    words = tokenizer("words")
    ids = words.convert_tokens_to_ids(["The", "sky"])
    write_prompts([Prompt(tokens=tuple(ids))], tmp_path / "p.jsonl")
    assert read_prompts(tmp_path / "p.jsonl", words)[0].token_text == ("The", "sky")


def test_digest_sees_what_a_measure_sees():
    prompt = the_prompt()
    same = Prompt(
        tokens=prompt.tokens, spans=dict(reversed(prompt.spans.items())), generated=prompt.generated
    )
    assert digest([prompt]) == digest([same])
    assert digest([Prompt(tokens=(1, 2, 3))]) == hashlib.sha256(b"[[1,2,3],{},[]]\n").hexdigest()
    others = [
        [prompt, prompt],
        [Prompt(tokens=(*prompt.tokens[:-1], 0), spans=prompt.spans, generated=prompt.generated)],
        [Prompt(tokens=prompt.tokens, spans=prompt.spans)],
        [Prompt(tokens=prompt.tokens, generated=prompt.generated)],
    ]
    assert len({digest([prompt]), *map(digest, others)}) == 5


def test_writing_is_atomic_and_strict(tmp_path):
    path = tmp_path / "p.jsonl"
    write_prompts([Prompt(tokens=(1,))], path)
    for attributes in ({"pair": (1, 2)}, {"x": float("nan")}, {"x": {1, 2}}, {1: 2}):
        with pytest.raises(InputError, match="plain JSON"):
            write_prompts([Prompt(tokens=(2,)), Prompt(tokens=(3,), attributes=attributes)], path)
    assert read_prompts(path) == [Prompt(tokens=(1,))]
    with pytest.raises(InputError, match="no prompt to write"):
        write_prompts([], path)
    with pytest.raises(InputError, match="cannot be written"):
        write_prompts([Prompt(tokens=(1,))], tmp_path / "absent" / "p.jsonl")
    with pytest.raises(InputError, match="cannot be written"):
        write_prompts([Prompt(tokens=(1,))], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]


def text_line(**changes):
    return json.dumps({"text": "The sky is blue.", "spans": {"needle": [[0, 7]]}, **changes})


def token_line(**changes):
    return json.dumps({"tokens": [1, 2, 3, 4], "spans": {"needle": [1, 2]}, **changes})


BROKEN = {
    "doubled characters": (text_line(spans={"a": [[0, 7], [6, 9]]}), "holds character 6 twice"),
    "part leaves its parent": (
        text_line(spans={"a": [[0, 3]], "a.1": [[2, 4]]}),
        'character 3, which is not in "a"',
    ),
    "generated overlaps": (
        text_line(generated=[[6, 9]]),
        'spans "needle" and "generated" share character 6',
    ),
    "broken JSON": ('{"text": "x"', "broken JSON .*column 13"),
}
"""Those of text, and one that breaks a whole file; all others are in the catalogue of bad inputs
(support/bad_inputs).
"""


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_lines(tmp_path, fault):
    """The message is one line and names the file and the line; nothing is read from a file with one
    broken line.
    """
    line, message = BROKEN[fault]
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{token_line()}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_prompts(path, tokenizer("words"))
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_model_s_vocabulary_bounds_token_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(token_line(), encoding="utf-8")
    assert read_prompts(path, vocab_size=5)[0].tokens == (1, 2, 3, 4)
    path.write_text(text_line())
    with pytest.raises(InputError, match="beyond the vocabulary of 3"):
        read_prompts(path, tokenizer("words"), vocab_size=3)


def test_windows_files_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + token_line().encode() + b"\r\n" + token_line().encode() + b"\r\n"
    )
    assert len(read_prompts(path)) == 2


def test_text_and_characters_come_together():
    with pytest.raises(InputError, match="come together"):
        Prompt(tokens=(1,), characters={})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"spans": {"rest": (0,)}}, "the rest is what no other span holds"),
        ({"generated": (6, 8)}, "holds token 6, but the prompt has the tokens 0 to 2"),
        ({"generated": (0.5,)}, "wanted whole numbers, token indices from 0 to 2"),
        ({"spans": {"a": (1 << 70,)}}, "wanted whole numbers, token indices from 0 to 2"),
        ({"tokens": (-1, 2)}, "wanted whole numbers from 0"),
    ],
)
def test_what_no_prompt_can_hold_is_refused(given, line):
    """Found: a span called rest took the place of the rest, and fractions were cut to whole
    indices.
    """
    with pytest.raises(InputError, match=line):
        Prompt(**{"tokens": (1, 2, 3), **given})


def test_a_file_of_plain_text_and_standard_input_are_one_prompt(tmp_path, monkeypatch):
    import io

    from transformers import AutoTokenizer

    from repo_interp.shipped import zoo_path

    tokenizer = AutoTokenizer.from_pretrained(zoo_path("niah/repo"))
    line = '{"text": "w0 w1 w2"}\n'
    (tmp_path / "notes.txt").write_text("w0 w1\n\nw2\n", encoding="utf-8")
    (tmp_path / "notes").write_text(line, encoding="utf-8")
    (prompt,) = read_prompts(tmp_path / "notes.txt", tokenizer)
    (json_prompt,) = read_prompts(tmp_path / "notes", tokenizer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
    assert read_prompts("-", tokenizer)[0].tokens == json_prompt.tokens and prompt.spans == {}
    (tmp_path / "notes.jsonl").write_text("w0 w1\n", encoding="utf-8")
    with pytest.raises(InputError, match="broken JSON"):
        read_prompts(tmp_path / "notes.jsonl", tokenizer)


# ---- logged evaluations --------------------------------------------------------------------------

ROME = (
    "The special number of Rome is 4711. The special number of Oslo is 98. What is the "
    "special number of Rome? Answer:"
)
# written by inspect-ai 0.3.285 (mockllm), without what is not read: events, usage, times
INSPECT = {
    "version": 2,
    "status": "success",
    "eval": {"task": "numbers", "model": "mockllm/model"},
    "samples": [
        {
            "id": 1,
            "epoch": 1,
            "input": ROME,
            "target": "4711",
            "messages": [
                {
                    "id": "3gvPi7CoWxEJJ8HCoQSn2q",
                    "content": ROME,
                    "source": "input",
                    "role": "user",
                },
                {
                    "id": "f4ATJG35Mb6moEVKgnqiGf",
                    "content": " 4711",
                    "source": "generate",
                    "role": "assistant",
                    "model": "mockllm/model",
                },
            ],
            "output": {"model": "mockllm/model", "choices": [], "completion": " 4711"},
            "scores": {
                "includes": {"value": "C", "answer": " 4711", "explanation": " 4711", "history": []}
            },
        },
        {
            "id": "two",
            "epoch": 1,
            "input": [
                {"id": "c6kFSA54rfPfd3AuLf7BN5", "content": "Answer shortly.", "role": "system"},
                {
                    "id": "JGEyCJweP4z26KFvPYSkzT",
                    "content": [{"type": "text", "text": ROME}],
                    "role": "user",
                },
            ],
            "target": ["98", "98."],
            "output": {"model": "mockllm/model", "completion": " 4711"},
            "scores": {"includes": {"value": "I"}},
        },
    ],
}
HARNESS = {  # as lm-evaluation-harness 0.4.9 writes a sample of generate_until
    "doc_id": 3,
    "doc": {"question": ROME},
    "target": "4711",
    "arguments": {"gen_args_0": {"arg_0": ROME, "arg_1": {"until": ["\n"]}}},
    "resps": [[" 98"]],
    "filtered_resps": [" 98"],
    "filter": "none",
    "metrics": ["exact_match"],
    "exact_match": 0.0,
}


def texts_of(prompt, places):
    return "".join(prompt.token_text[place] for place in places)


@pytest.mark.parametrize("form", ["json", "eval"])
def test_a_log_of_inspect_is_read_as_prompts(tmp_path, form):
    file = tmp_path / f"log.{form}"
    if form == "json":
        file.write_text(json.dumps(INSPECT, indent=2))
    else:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("header.json", json.dumps({"eval": INSPECT["eval"]}))
            for number, sample in enumerate(INSPECT["samples"], start=1):
                archive.writestr(f"samples/{number}_epoch_1.json", json.dumps(sample))
    with pytest.warns(
        Note,
        match="the log holds messages, not the text that the model read; .*; left out: nothing",
    ):
        one, two = read_prompts(file, tokenizer("byte_level_bpe"))
    # as inspect-ai's provider `hf` writes them for a tokenizer without a chat template
    assert (
        one.text == f"user: {ROME}\n 4711"
        and two.text == f"system: Answer shortly.\nuser: {ROME}\n 4711"
    )
    assert [texts_of(prompt, prompt.generated).strip() for prompt in (one, two)] == ["4711", "4711"]
    assert (
        texts_of(one, one.spans["needle"]).strip() == "4711"
        and texts_of(two, two.spans["needle"]).strip() == "98"
    )
    assert two.attributes == {
        "id": "two",
        "targets": ["98", "98."],
        "scores": {"includes": "I"},
        "epoch": 1,
    }


@pytest.fixture
def chat_tokenizer():
    """One with a chat template, which writes the BOS, as that of Llama does."""
    ours = copy.deepcopy(tokenizer("byte_level_bpe"))
    ours.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'critic' %}{{ "
        "raise_exception('no critics') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt "
        "%}[assistant]{% endif %}"
    )
    return ours


def test_messages_of_a_log_are_put_into_the_chat_template_and_what_is_left_out_is_named(
    tmp_path, chat_tokenizer
):
    """Found: "2+2?4", after a tool "44", no template, and reasoning and tool calls gone without a
    word.
    """
    user, tool = (
        {"role": "user", "content": "2+2?"},
        {"role": "tool", "content": "4", "tool_call_id": "a", "function": "add"},
    )
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "function": "add", "arguments": {"x": 2}}],
    }
    content = [
        {"type": "reasoning", "reasoning": "easy", "redacted": False},
        {"type": "text", "text": "4"},
    ]
    answer = {"role": "assistant", "content": content, "source": "generate"}
    sample = {
        "id": 1,
        "input": "2+2?",
        "target": "4",
        "messages": [user, calls, tool, answer],
        "output": {"completion": "4"},
    }
    offered = [{"event": "model", "tools": [{"name": "add"}]}]

    def read(*samples):
        (tmp_path / "log.json").write_text(json.dumps({"eval": {}, "samples": list(samples)}))
        return read_prompts(tmp_path / "log.json", chat_tokenizer)

    with pytest.warns(Note) as warned:
        called, thought, answered = read(
            sample | {"events": offered},
            sample | {"messages": [user, answer]},
            sample
            | {"messages": [user, answer, {"role": "user", "content": "behind it"}], "output": {}},
        )
    assert called.text == "<bos>[user]2+2?[assistant][tool]4[assistant]4"
    assert called.token_text[:2] == ("<bos>", "[") and texts_of(called, called.generated) == "4"
    assert called.attributes["left_out"] == ["reasoning", "tool calls", "tools"]
    assert thought.text == "<bos>[user]2+2?[assistant]4" and thought.attributes["left_out"] == [
        "reasoning"
    ]
    assert answered.generated == () and "behind it" in answered.text
    left_out = [str(note.message).rpartition("left out: ")[2] for note in warned]
    assert left_out == ["reasoning, tool calls, tools", "reasoning", "reasoning"]
    with pytest.raises(
        InputError,
        match=r"log\.json, sample 0: the chat template of the tokenizer does not take the messages",
    ):
        read(sample | {"messages": [{"role": "critic", "content": "2+2?"}]})


def test_a_text_that_begins_with_the_bos_gets_no_second_one(tmp_path):
    """Found in logs of the harness with a chat template; the harness itself feeds one."""
    known = tokenizer("byte_level_bpe")
    plain = prompt_from_text("2+2?", {}, known)
    (tmp_path / "samples.jsonl").write_text(
        json.dumps(HARNESS | {"arguments": [["<bos>2+2?", {}]], "resps": []}) + "\n"
    )
    written = prompt_from_text("<bos>2+2?", {"query": ((5, 9),)}, known)
    (logged,) = read_prompts(tmp_path / "samples.jsonl", known)
    assert (
        plain.tokens == written.tokens == logged.tokens
        and plain.tokens.count(known.bos_token_id) == 1
    )
    assert (
        texts_of(written, written.spans["query"]) == "2+2?"
        and "".join(written.token_text) == "<bos>2+2?"
    )


def test_samples_of_the_harness_are_read_as_they_were_fed(tmp_path):
    file = tmp_path / "samples.jsonl"

    def read(*records):
        file.write_text("\n".join(map(json.dumps, records)) + "\n")
        return read_prompts(file, tokenizer("byte_level_bpe"))

    strict, flexible = (
        HARNESS | {"filter": "strict"},
        HARNESS | {"filter": "flexible", "exact_match": 1.0},
    )
    # found: two filters doubled every prompt
    once, other = read(strict, flexible, strict | {"doc_id": 4})
    assert (
        once.attributes["scores"] == {"exact_match,strict": 0.0, "exact_match,flexible": 1.0}
        and other.attributes["doc_id"] == 4
    )
    assert len(read(HARNESS, HARNESS)) == 2  # what was logged twice is there twice
    for target in (None, "None"):  # found: None was looked for; the harness writes it as a text
        (none,) = read(HARNESS | {"target": target, "arguments": [["None of these? A:", {}]]})
        assert none.spans == {} and none.answers == () and none.text == "None of these? A: 98"
    # found: its log-likelihood was its answer
    (rolling,) = read(HARNESS | {"arguments": [[ROME]], "resps": [["-12.5"]]})
    assert rolling.text == ROME and rolling.generated == () and rolling.spans == {}
    # found: of several inputs with one continuation (winogrande) the first was read
    pairs = {
        "gen_args_0": {"arg_0": "The case", "arg_1": " is big."},
        "gen_args_1": {"arg_0": "The cup", "arg_1": " is big."},
    }
    inputs = HARNESS | {
        "target": "is big.",
        "arguments": pairs,
        "resps": [[["-9.5", "False"]], [["-3.25", "False"]]],
    }
    for accuracy, text in ((1.0, "The cup is big."), (0.0, "The case is big.")):
        (right,) = read(inputs | {"acc": accuracy})
        assert right.text == text and texts_of(right, right.generated) == " is big."
    more = pairs | {"gen_args_2": {"arg_0": "The hat", "arg_1": " is big."}}
    for unknown in (
        inputs,
        inputs | {"acc": 1.0, "resps": []},
        inputs | {"acc": 0.0, "arguments": more},
    ):
        with pytest.raises(
            InputError,
            match=r"samples.jsonl, line 1: the sample has \d inputs, and nothing in it says "
            r"which is right",
        ):
            read(unknown)
    # mutual information asks for each without its question too
    choices = [["Q:", " x"], ["Q:", " y"], ["", " x"], ["", " y"]]
    assert [
        prompt.text
        for prompt in read(*(HARNESS | {"arguments": choices, "target": n} for n in ("1", "x")))
    ] == [
        "Q: y",
        "Q: x",
    ]
    with pytest.raises(InputError, match="the model was given more than text"):
        read(HARNESS | {"arguments": [["Q:", {}, {"visual": ["a picture"]}]]})


def test_a_sample_of_the_harness_is_read_with_its_answer(tmp_path):
    file = tmp_path / "samples_numbers.jsonl"
    # stands twice in the text, so nothing says which is meant
    twice = HARNESS | {"target": "Rome", "resps": []}
    file.write_text("\n".join(map(json.dumps, (HARNESS, twice))) + "\n")
    one, other = read_prompts(file, tokenizer("byte_level_bpe"))
    assert one.text == f"{ROME} 98" and texts_of(one, one.generated).strip() == "98"
    assert texts_of(one, one.spans["needle"]).strip() == "4711"
    assert one.attributes == {"doc_id": 3, "targets": ["4711"], "scores": {"exact_match": 0.0}}
    assert other.spans == {} and other.generated == () and other.text == ROME


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"PK\x03\x04 not an archive", "the archive is damaged"),
        (
            json.dumps(INSPECT | {"samples": []}).encode(),
            "wanted a text, or one prompt per line in JSON",
        ),
        (json.dumps(INSPECT | {"samples": [{"id": 1}]}).encode(), "log, sample 0: "),
        (
            json.dumps(HARNESS | {"arguments": {}}).encode(),
            "log, line 1: the sample has no text among its arguments",
        ),
        (json.dumps(HARNESS | {"arguments": 5}).encode(), "log, line 1: "),
    ],
)
def test_a_broken_log_is_refused_in_one_line(tmp_path, content, line):
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_prompts(tmp_path / "log", tokenizer("byte_level_bpe"))
    assert line in str(refused.value) and "\n" not in str(refused.value)
