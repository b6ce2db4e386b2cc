"""Prompts and prompts.jsonl: what comes back is what was written; what is broken is refused in one
line that says where.
"""

import copy
import hashlib
import io
import json
import zipfile

import pytest
from refusals import refused
from task_tokenizers import tokenizer

from repo_interp.errors import Note
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


@pytest.mark.parametrize("family", ["byte_level_bpe_trimmed", "metaspace_unigram"])
def test_text_round_trip(tmp_path, family):
    prompts = [the_prompt(family), *niah(tokenizer(family), "multivalue", 700, 1)]
    write_prompts(prompts, tmp_path / "prompts.jsonl")
    assert read_prompts(tmp_path / "prompts.jsonl", tokenizer(family)) == prompts


def test_the_file_is_as_documented(tmp_path):
    of_tokens = Prompt(tokens=(3, 4), spans={"needle": (0,)}, generated=(1,))
    write_prompts([the_prompt(), of_tokens], tmp_path / "p.jsonl")
    first, second = map(json.loads, (tmp_path / "p.jsonl").read_text("utf-8").splitlines())
    assert (first["text"], first["generated"]) == (TEXT, [[93, 100]])
    assert first["spans"]["needle"] == [[20, 80]]
    assert second == {"tokens": [3, 4], "spans": {"needle": [0]}, "generated": [1]}


def test_a_tokenizer_names_the_tokens_of_a_token_prompt(tmp_path):
    words = tokenizer("words")
    ids = words.convert_tokens_to_ids(["The", "sky"])
    write_prompts([Prompt(tokens=tuple(ids))], tmp_path / "p.jsonl")
    assert read_prompts(tmp_path / "p.jsonl", words)[0].token_text == ("The", "sky")


def test_digest_sees_what_a_measure_sees():
    prompt = the_prompt()
    tokens, spans, generated = prompt.tokens, prompt.spans, prompt.generated
    reordered = dict(reversed(spans.items()))
    assert digest([prompt]) == digest([Prompt(tokens, reordered, generated)])
    assert digest([Prompt(tokens=(1, 2, 3))]) == hashlib.sha256(b"[[1,2,3],{},[]]\n").hexdigest()
    others = [
        Prompt((*tokens[:-1], 0), spans, generated),
        Prompt(tokens, spans),
        Prompt(tokens, generated=generated),
    ]
    assert len({digest(given) for given in ([prompt], [prompt] * 2, *zip(others))}) == 5


def test_writing_is_atomic_and_strict(tmp_path):
    one, path = Prompt(tokens=(1,)), tmp_path / "p.jsonl"
    write_prompts([one], path)
    for attributes in ({"pair": (1, 2)}, {"x": float("nan")}, {"x": {1, 2}}, {1: 2}):
        with refused("plain JSON"):
            write_prompts([one, Prompt(tokens=(3,), attributes=attributes)], path)
    with refused("no prompt to write"):
        write_prompts([], path)
    with refused("cannot be written"):
        write_prompts([one], tmp_path)
    assert read_prompts(path) == [one] and [*tmp_path.iterdir()] == [path]


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
    """The message names the file and the line; nothing is read from a file with one broken line."""
    line, message = BROKEN[fault]
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{token_line()}\n\n{line}\n", encoding="utf-8")
    with refused(rf"^{path}, line 3: .*{message}"):
        read_prompts(path, tokenizer("words"))


def test_the_model_s_vocabulary_bounds_token_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(token_line(), encoding="utf-8")
    assert read_prompts(path, vocab_size=5)[0].tokens == (1, 2, 3, 4)
    with refused("beyond the vocabulary of 4"):
        read_prompts(path, vocab_size=4)


def test_windows_files_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + token_line().encode() + b"\r\n" + token_line().encode() + b"\r\n"
    )
    assert len(read_prompts(path)) == 2


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"spans": {"rest": (0,)}}, "the rest is every token outside of other spans"),
        ({"generated": (6, 8)}, "holds token 6, but the prompt has the tokens 0 to 2"),
        ({"generated": (0.5,)}, "wanted whole numbers, token indices from 0 to 2"),
        ({"spans": {"a": (1 << 70,)}}, "but the prompt has the tokens 0 to 2"),
        ({"tokens": (-1, 2)}, "wanted whole numbers from 0"),
        ({"characters": {}}, "come together"),
    ],
)
def test_what_no_prompt_can_hold_is_refused(given, line):
    """Found: a span called rest took the place of the rest, and fractions were cut to whole
    indices.
    """
    with refused(line):
        Prompt(**{"tokens": (1, 2, 3), **given})


def test_a_file_of_plain_text_and_standard_input_are_one_prompt(tmp_path, monkeypatch):
    one, line = tokenizer("words"), text_line(spans={})
    (tmp_path / "notes.txt").write_text("The sky\n\nis blue.\n", encoding="utf-8")
    (tmp_path / "notes").write_text(line, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
    prompts = [read_prompts(place, one) for place in (tmp_path / "notes.txt", tmp_path / "notes")]
    ((text,), (of_json,), (typed,)) = (*prompts, read_prompts("-", one))
    assert text.tokens == of_json.tokens == typed.tokens and text.spans == {}
    (tmp_path / "notes.jsonl").write_text("w0 w1\n", encoding="utf-8")
    with refused("broken JSON"):
        read_prompts(tmp_path / "notes.jsonl", one)


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
                {"id": "3gvP", "content": ROME, "source": "input", "role": "user"},
                {"id": "f4AT", "content": " 4711", "source": "generate", "role": "assistant"},
            ],
            "output": {"model": "mockllm/model", "choices": [], "completion": " 4711"},
            "scores": {"includes": {"value": "C", "answer": " 4711", "history": []}},
        },
        {
            "id": "two",
            "epoch": 1,
            "input": [
                {"id": "c6kF", "content": "Answer shortly.", "role": "system"},
                {"id": "JGEy", "content": [{"type": "text", "text": ROME}], "role": "user"},
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


def text_of(prompt, span):
    """The text of a span, or of what is generated."""
    places = prompt.all_spans()[span]
    return "".join(prompt.token_text[place] for place in places).strip()


@pytest.fixture
def log(tmp_path):
    """Writes records as a file, a line each, and reads its prompts."""

    def read(*records, known=None):
        (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
        return read_prompts(tmp_path / "samples.jsonl", known or tokenizer("byte_level_bpe"))

    return read


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
        Note, match="messages, not the text that the model read; .*; left out: nothing"
    ):
        one, two = read_prompts(file, tokenizer("byte_level_bpe"))
    # as inspect-ai's provider `hf` writes them for a tokenizer without a chat template
    assert one.text == f"user: {ROME}\n 4711"
    assert two.text == f"system: Answer shortly.\nuser: {ROME}\n 4711"
    found = [[text_of(prompt, name) for name in ("generated", "needle")] for prompt in (one, two)]
    assert found == [["4711", "4711"], ["4711", "98"]]
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
    user = {"role": "user", "content": "2+2?"}
    tool = {"role": "tool", "content": "4", "tool_call_id": "a", "function": "add"}
    call = {"id": "a", "function": "add", "arguments": {"x": 2}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    content = [{"type": "reasoning", "reasoning": "easy"}, {"type": "text", "text": "4"}]
    answer = {"role": "assistant", "content": content, "source": "generate"}
    offered = [{"event": "model", "tools": [{"name": "add"}]}]

    def sample(*messages, output="4", **more):
        given = {"messages": messages, "output": {"completion": output} if output else {}}
        return {"id": 1, "input": "2+2?", "target": "4", **given, **more}

    def read(*samples):
        (tmp_path / "log.json").write_text(json.dumps({"eval": {}, "samples": list(samples)}))
        return read_prompts(tmp_path / "log.json", chat_tokenizer)

    behind = {"role": "user", "content": "behind it"}
    with pytest.warns(Note) as warned:
        called, thought, answered = read(
            sample(user, calls, tool, answer, events=offered),
            sample(user, answer),
            sample(user, answer, behind, output=None),
        )
    assert called.text == "<bos>[user]2+2?[assistant][tool]4[assistant]4"
    assert called.token_text[:2] == ("<bos>", "[") and text_of(called, "generated") == "4"
    assert called.attributes["left_out"] == ["reasoning", "tool calls", "tools"]
    assert thought.text == "<bos>[user]2+2?[assistant]4"
    assert answered.generated == () and "behind it" in answered.text
    left_out = [str(note.message).rpartition("left out: ")[2] for note in warned]
    assert left_out == ["reasoning, tool calls, tools", "reasoning", "reasoning"]
    with refused(r"log\.json, sample 0: the chat template .* does not take the messages"):
        read(sample({"role": "critic", "content": "2+2?"}))


def test_a_text_that_begins_with_the_bos_gets_no_second_one(log):
    """Found in logs of the harness with a chat template; the harness itself feeds one."""
    known = tokenizer("byte_level_bpe")
    plain = prompt_from_text("2+2?", {}, known)
    written = prompt_from_text("<bos>2+2?", {"query": ((5, 9),)}, known)
    (logged,) = log(HARNESS | {"arguments": [["<bos>2+2?", {}]], "resps": []})
    assert plain.tokens == written.tokens == logged.tokens
    assert plain.tokens.count(known.bos_token_id) == 1
    assert text_of(written, "query") == "2+2?" and "".join(written.token_text) == "<bos>2+2?"


def test_filters_and_targets_of_a_sample_of_the_harness(log):
    strict, flexible = (
        HARNESS | {"filter": name, "exact_match": match}
        for name, match in (("strict", 0.0), ("flexible", 1.0))
    )
    # found: two filters doubled every prompt
    once, other = log(strict, flexible, strict | {"doc_id": 4})
    assert once.attributes["scores"] == {"exact_match,strict": 0.0, "exact_match,flexible": 1.0}
    assert other.attributes["doc_id"] == 4
    assert len(log(HARNESS, HARNESS)) == 2  # what was logged twice is there twice
    for target in (None, "None"):  # found: None was looked for; the harness writes it as a text
        (none,) = log(HARNESS | {"target": target, "arguments": [["None of these? A:", {}]]})
        assert none.spans == {} and none.answers == () and none.text == "None of these? A: 98"
    # found: its log-likelihood was its answer
    (rolling,) = log(HARNESS | {"arguments": [[ROME]], "resps": [["-12.5"]]})
    assert rolling.text == ROME and rolling.generated == () and rolling.spans == {}


def test_of_several_inputs_of_a_sample_the_right_one_is_read(log):
    """Found: of several inputs with one continuation (winogrande) the first was read."""
    nouns = ("case", "cup", "hat")
    args = [{"arg_0": f"The {noun}", "arg_1": " is big."} for noun in nouns]
    pairs, more = ({f"gen_args_{n}": args[n] for n in range(count)} for count in (2, 3))
    resps = [[["-9.5", "False"]], [["-3.25", "False"]]]
    inputs = HARNESS | {"target": "is big.", "arguments": pairs, "resps": resps}
    for accuracy, text in ((1.0, "The cup is big."), (0.0, "The case is big.")):
        (right,) = log(inputs | {"acc": accuracy})
        assert right.text == text and text_of(right, "generated") == "is big."
    for unknown in ({}, {"acc": 1.0, "resps": []}, {"acc": 0.0, "arguments": more}):
        with refused(r"line 1: the sample has \d inputs, and nothing in it says which is right"):
            log(inputs | unknown)
    # mutual information asks for each without its question too
    choices = [["Q:", " x"], ["Q:", " y"], ["", " x"], ["", " y"]]
    by_number, by_name = log(*(HARNESS | {"arguments": choices, "target": n} for n in ("1", "x")))
    assert (by_number.text, by_name.text) == ("Q: y", "Q: x")
    with refused("the model was given more than text"):
        log(HARNESS | {"arguments": [["Q:", {}, {"visual": ["a picture"]}]]})


def test_a_sample_of_the_harness_is_read_with_its_answer(log):
    # stands twice in the text, so nothing says which is meant
    one, other = log(HARNESS, HARNESS | {"target": "Rome", "resps": []})
    assert one.text == f"{ROME} 98"
    assert (text_of(one, "generated"), text_of(one, "needle")) == ("98", "4711")
    assert one.attributes == {"doc_id": 3, "targets": ["4711"], "scores": {"exact_match": 0.0}}
    assert other.spans == {} and other.generated == () and other.text == ROME


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"PK\x03\x04 not an archive", "the archive is damaged"),
        (INSPECT | {"samples": []}, "wanted a text, or one prompt per line in JSON"),
        (INSPECT | {"samples": [{"id": 1}]}, "log, sample 0: "),
        (HARNESS | {"arguments": {}}, "log, line 1: the sample has no text among its arguments"),
        (HARNESS | {"arguments": 5}, "log, line 1: "),
    ],
)
def test_a_broken_log_is_refused_in_one_line(tmp_path, content, line):
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "log").write_bytes(written)
    with refused(line):
        read_prompts(tmp_path / "log", tokenizer("byte_level_bpe"))
