"""How the data sets score an answer: each a number from 0 to 1, the best over the reference answers.

    normal(s)          lower case, without punctuation and without the words a, an, the; white space as single spaces (SQuAD)
    exact match        1 where normal(output) = normal(answer)                                                    HybridQA
    F1                 2 P R / (P + R) over the words of the normal texts, as bags                   Qasper, LongBench, HybridQA
    ROUGE-L            2 P R / (P + R), P = |U| / |words of the output|, R = |U| / |words of the answer|, each word once;
                       U: words of the longest common subsequences of every sentence of the one with every one of the other
    retrieval, count   share of the right one among all numbers in the output                                     LongBench
    classification     1 / k where the right class is among the k classes named in the output, else 0; a class whose name is a part
                       of the right one's does not count                                                          LongBench
    edit similarity    2 M / T of the first line that is no comment, M matching characters of T in both, in whole per cent   LongBench
    accuracy           1 where the option's letter is the one that the output says (its last choice where it says none)   MMLU-Pro
    following          1 where the output begins with a label of the examples                                HoPE sec. 4.1, GLUE
    label accuracy     1 where it begins with the right one                                                       GLUE

Punctuation goes before articles do, as in SQuAD's script. ROUGE-L is that of the package `rouge`, which LongBench uses: a full stop ends
a sentence, and one of white space alone has the empty word. F1 of an empty answer is 1 for an empty output in HybridQA, else 0.
LongBench's script overlooks the second of two neighbouring classes that do not count; here none counts. Where MMLU-Pro's script guesses
at random because nothing was said, nothing is right here. Knows nothing about files, tokens and prompts.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SAYS = (re.compile(r"answer is \(?([A-J])\)?"), re.compile(r".*[aA]nswer:\s*([A-J])"), re.compile(r"[A-J](?=[^A-J]*$)"))
_COMMENTS = ("`", "#", "//")
_SMALL = 1e-8


def normal(text: str) -> str:
    """`text` in the form in which answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(output: str, answer: str) -> float:
    """1 where both are the same but for case, punctuation, articles and white space."""
    return float(normal(output) == normal(answer))


def token_f1(output: str, answer: str) -> float:
    """F1 of the words; 0 where they share none."""
    given, wanted = normal(output).split(), normal(answer).split()
    return _harmonic((Counter(given) & Counter(wanted)).total(), len(given), len(wanted))


def hybrid_f1(output: str, answer: str) -> float:
    """F1 of the words; where one text has none, whether both have none."""
    given, wanted = normal(output).split(), normal(answer).split()
    return token_f1(output, answer) if given and wanted else float(given == wanted)


def rouge_l(output: str, answer: str) -> float:
    """F of sentence-wise ROUGE-L; 0 where one text has no words."""
    given, wanted = _sentences(output), _sentences(answer)
    known = [{word for sentence in text for word in sentence} for text in (given, wanted)]
    if not known[0] or not known[1]:
        return 0.0
    common = {word for reference in wanted for sentence in given for word in _common_subsequence(reference, sentence)}
    precision, recall = (len(common) / len(words) for words in known)
    return 2 * precision * recall / (precision + recall + _SMALL)


def number_share(output: str, answer: str) -> float:
    """Share of the numbers in `output` that are the one in `answer`; 0 where there are none."""
    wanted, given = re.findall(r"\d+", answer), re.findall(r"\d+", output)
    return given.count(wanted[0]) / len(given) if given and wanted else 0.0


def classification(output: str, answer: str, classes: Sequence[str]) -> float:
    """1 / number of classes named in `output` where `answer` is among them."""
    named = [name for name in classes if name in output and not (name in answer and name != answer)]
    return 1 / len(named) if answer in named else 0.0


def edit_similarity(output: str, answer: str) -> float:
    """How alike the first line that is no comment is to `answer`, in whole per cent, from 0 to 1."""
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _COMMENTS)), "")
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def choice(output: str) -> str | None:
    """The letter of the option that `output` says it chooses; None where it names none."""
    return next((match.group(match.lastindex or 0) for pattern in _SAYS if (match := pattern.search(output))), None)


def _best(metric: Callable[[str, str], float]) -> Callable[[str, Sequence[str], Mapping[str, Any]], float]:
    return lambda output, answers, _: max((metric(output, answer) for answer in answers), default=0.0)


METRICS: Mapping[str, Callable[[str, Sequence[str], Mapping[str, Any]], float]] = {
    "exact match": _best(exact_match),
    "F1": _best(token_f1),
    "F1 (HybridQA)": _best(hybrid_f1),
    "ROUGE-L": _best(rouge_l),
    "retrieval": _best(number_share),
    "count": _best(number_share),
    "edit similarity": _best(edit_similarity),
    "classification": lambda output, answers, known: max(
        (classification(output, answer, known["classes"]) for answer in answers), default=0.0
    ),
    "accuracy": lambda output, answers, known: float(choice(output) == known["letter"]),
    "following": lambda output, answers, known: float(output.lstrip().startswith(tuple(known["labels"]))),
    "label accuracy": _best(lambda output, answer: float(output.lstrip().startswith(answer))),
}
"""By name: a score of an output, given the reference answers and the prompt's attributes."""


def _harmonic(common: int, given: int, wanted: int) -> float:
    if not common:
        return 0.0
    precision, recall = common / given, common / wanted
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    return [part.split() or [""] for part in text.split(".") if part]


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence; of several, the one that gives up words of `other` first."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for row, word in enumerate(one, start=1):
        above, here = lengths[row - 1], lengths[row]
        for column, its in enumerate(other, start=1):
            here[column] = above[column - 1] + 1 if word == its else max(above[column], here[column - 1])
    words, row, column = set(), len(one), len(other)
    while row and column:
        if one[row - 1] == other[column - 1]:
            words.add(one[row - 1])
            row, column = row - 1, column - 1
        elif lengths[row - 1][column] > lengths[row][column - 1]:
            row -= 1
        else:
            column -= 1
    return words
