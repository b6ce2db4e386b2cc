"""Positions that are made of one known thing, over texts that are drawn: what names must tell apart."""

import zlib
from dataclasses import replace

import numpy as np
import torch
from attention_inputs import random_inputs

from repo_interp.inputs import AttentionInputs
from repo_interp.plugins.segments.segments import KINDS
from repo_interp.tasks.prompt.structure import prompt_structure

TOKENS, WORDS = 480, 250


def drawn_text(random, tokens=TOKENS, breaks="alone"):
    """Token ids and texts: sentences of words by Zipf's law, in lines and paragraphs.

    A line break is a token "alone", or part of the "last" token of its line, whose id says nothing
    of it.
    """
    ids, texts = [], []

    def add(number, text):
        ids.append(number)
        texts.append(text)

    while len(ids) < tokens:
        for _ in range(random.integers(2, 5)):  # sentences of a line
            for place in range(random.integers(3, 12)):
                word = min(int(random.zipf(1.3)), WORDS) + 4
                add(word, (" W" if place == 0 else " w") + "o" * (word % 7) + "rd")
                if random.random() < 0.2:
                    add(1, ",")
            add(2, ".")
        if breaks == "alone":
            add(3, "\n")
        else:
            ids[-1] = min(int(random.zipf(1.3)), WORDS) + 4
            texts[-1] = texts[-1] + "\n"
    return ids[:tokens], texts[:tokens]


def number(*content):
    """A number from 0 to 1 that content always has."""
    return zlib.crc32(repr(content).encode()) / 2**32


def table(seed, ids):
    """A random number of every id."""
    return np.array([number(seed, int(one)) for one in ids])


def since(starts):
    """Tokens since the latest start."""
    index = np.arange(len(starts))
    return index - np.maximum.accumulate(np.where(starts, index, 0))


def leaky(values, keep):
    """Means that forget: keep of the last one, the rest of the new number."""
    means, mean = np.empty(len(values)), 0.0
    for place, value in enumerate(values):
        means[place] = mean = keep * mean + (1 - keep) * value
    return means


def sources(ids, texts, starts, random, seed):
    """Positions [token] by what they are made of."""
    index, share = np.arange(len(ids)), np.arange(len(ids)) / len(ids)
    before, earlier = np.array([0, *ids[:-1]]), np.array([0, 0, *ids[:-2]])
    word, previous = table(seed, ids), table(seed, before)
    occurrences = np.array([ids[: place + 1].count(one) for place, one in enumerate(ids)])
    line, sentence = since(starts["lines"]), since(starts["sentences"])
    breaks = np.array(["\n" in text for text in texts])
    commas = np.array(["," in text for text in texts])

    def noisy(values, size):
        return values + size * np.std(values) * random.normal(size=len(values))

    def noise():
        return random.normal(size=len(ids))

    return {
        "index": index,
        "index, falling": -index,
        "index within 2 positions": 2 * share,
        "index, noise of .02": noisy(index, 0.02),
        "index, noise of .1": noisy(index, 0.1),
        "index, noise of .3": noisy(index, 0.3),
        "index, noise of .7": noisy(index, 0.7),
        "index, noise of 2": noisy(index, 2),
        "logarithm of the index": np.log1p(index),
        "root of the index": np.sqrt(index),
        "index in steps of 16": index // 16,
        "index in steps of 64": index // 64,
        "index mod 50": index % 50,
        "index mod 7": index % 7,
        "hinge": np.maximum(0, share - 0.5),
        "V": np.abs(share - 0.5),
        "step": share >= 0.5,
        "sine": np.sin(2 * np.pi * share),
        "word": word,
        "word, noise of .5": noisy(word, 0.5),
        "length of the word": np.array([len(text.strip()) for text in texts]),
        "line break": breaks,
        "comma": commas,
        "capital": np.array([text.strip()[:1].isupper() for text in texts]),
        "previous word": previous,
        "previous word, noise of .5": noisy(previous, 0.5),
        "word before the previous": table(seed, earlier),
        "pair of words": np.array([number(seed, *pair) for pair in zip(before, ids, strict=True)]),
        "lines so far": np.cumsum(breaks),
        "commas so far": np.cumsum(commas),
        "occurrences of the word so far": occurrences,
        "different words so far": np.cumsum(occurrences == 1),
        "index in the line": line,
        "index in the line, falling": -line,
        "index in the sentence": sentence,
        "logarithm of the index in the line": np.log1p(line),
        "first of a line": starts["lines"],
        "last of a line": np.roll(starts["lines"], -1),
        "lines, odd or even": np.cumsum(starts["lines"]) % 2,
        "leaky mean of words, .5": leaky(word - word.mean(), 0.5),
        "leaky mean of words, .9": leaky(word - word.mean(), 0.9),
        "leaky mean of words, .98": leaky(word - word.mean(), 0.98),
        "leaky mean of noise, .5": leaky(noise(), 0.5),
        "leaky mean of noise, .95": leaky(noise(), 0.95),
        "random walk": np.cumsum(noise()),
        "noise": noise(),
        "constant": np.ones(len(ids)),
        "index, noise of .2, and word": noisy(index, 0.2) / index.std() + 0.5 * word / word.std(),
    }


def constructed(draws, texts=3, seed=0, chosen=None, **style) -> tuple[AttentionInputs, dict, list]:
    """Inputs of a layer with a head per source and draw, their spans, and the sources' names."""
    random = np.random.default_rng(seed)
    written = [drawn_text(random, **style) for _ in range(texts)]
    spans: dict[str, torch.Tensor] = {}
    rows, names = [], []
    for row, (ids, of_tokens) in enumerate(written):
        places = prompt_structure(KINDS, TOKENS, {}, of_tokens)
        starts = {kind: np.zeros(TOKENS, bool) for kind in KINDS}
        for name, tokens in places.items():
            mask = spans.setdefault(name, torch.zeros((texts, TOKENS), dtype=torch.bool))
            mask[row, list(tokens)] = True
            kind = name.split(".")[1] if name.endswith(".starts") else None
            if kind in starts:
                starts[kind][list(tokens)] = True
        made = [
            (name, values)
            for draw in range(draws)
            for name, values in sources(ids, of_tokens, starts, random, (seed, draw)).items()
            if chosen is None or name in chosen
        ]
        names = [name for name, _ in made]
        rows.append([np.asarray(values, float) for _, values in made])
    inputs = random_inputs(
        prompts=texts, heads=len(names), kv_heads=len(names), tokens=TOKENS, d_head=2
    )
    positions = torch.as_tensor(np.array(rows))
    tokens = torch.as_tensor(np.array([ids for ids, _ in written]))
    return replace(inputs, positions=positions, tokens=tokens), spans, names
