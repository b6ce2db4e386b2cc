"""The vocabulary and tokenizer of a synthetic task, and English words to draw from.

A token id is an index in a list of words. Ids 0 and 1 are <pad> and <bos>; the words of the task
follow. Text is words separated by single spaces; the tokenizer prepends <bos>. An unknown word is
refused, never replaced. This module does not know the meaning of words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from repo_interp.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS = 0, 1


@dataclass(frozen=True)
class Vocabulary:
    """Words of a task, without the two special tokens.

    Raises InputError for repeated words and words with white space.
    """

    task_words: tuple[str, ...]

    def __post_init__(self) -> None:
        for word in self.task_words:
            if not word or word.split() != [word]:
                raise InputError(
                    f"{word!r} is no word of a vocabulary: wanted text without white space"
                )
        if len(set(self.words)) < len(self.words):
            doubled = sorted(word for word in set(self.words) if self.words.count(word) > 1)
            raise InputError(f"the word {doubled[0]!r} occurs twice in a vocabulary; keep one")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Every word, by id."""
        return ("<pad>", "<bos>", *self.task_words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, word: str) -> int:
        """The id of a word."""
        return self._ids[word]

    def ids(self, words: Iterable[str]) -> list[int]:
        """Look up words.

        Args:
            words: Words of the vocabulary.

        Returns:
            Their ids.
        """
        return [self._ids[word] for word in words]

    def text(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Look up ids.

        Args:
            tokens: Token ids.

        Returns:
            Their words.
        """
        return tuple(self.words[token] for token in tokens)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make a word-level tokenizer, to save with a checkpoint.

        Returns:
            A Hugging Face tokenizer of this vocabulary.
        """
        # Imported here: the import takes seconds, and most uses of a vocabulary need no tokenizer.
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        # Without an unk token the tokenizer refuses unknown words.
        backend = Tokenizer(models.WordLevel(self._ids))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # Our training sequences begin with <bos>.
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token="<pad>",
            bos_token="<bos>",
            # Decoding would remove spaces before punctuation, which are part of our texts.
            clean_up_tokenization_spaces=False,
        )


_NOUNS = """
apple bridge candle desert engine forest garden harbor island jacket kettle ladder market needle
orange pencil quarry ribbon saddle temple urchin valley window yogurt zipper anchor basket castle
dragon eagle feather guitar hammer insect jungle kitten lantern mirror napkin otter pillow quilt
rocket shovel tunnel umbrella violin walnut acorn badger cactus daisy easel falcon glacier helmet
iguana jewel koala lemon magnet nectar oyster parrot quiver raven sparrow turtle uniform velvet
whistle almond beetle canyon dolphin ember fiddle goblet hazel icicle jasmine kernel lizard meadow
notebook olive puddle quartz river scarf trumpet upland vessel willow yarn zebra archer bakery cabin
dagger elbow flute grape hinge ivory jigsaw kayak lagoon mango nutmeg opal pepper rabbit sailor
tulip vinegar wagon barrel coral drum engraving fountain granite hedge inlet jar kingdom leaf marble
nest orchard planet raisin statue thimble vine wheel avenue blanket cloud door envelope fence glove
hill ink jug knot lamp moss nail oven plank rope sponge thread urn vase wallet bucket chimney dune
echo ferry gate hive iris
"""
NOUNS = tuple(_NOUNS.split())
"""Nouns for built-in texts and needles."""

_ADJECTIVES = """
amber brave calm dainty eager faint gentle humble icy jolly keen lively mellow noble odd plain quiet
rapid silent tidy urban vivid warm young zesty ancient bitter clever distant elegant famous glossy
hollow ideal joyful kind lonely modest narrow open polite quick rough steady tender useful vast
weary agile bright crisp dusty early fluffy graceful hidden innocent jagged knotty loyal misty neat
ornate proud quaint rustic smooth tall uneven velvety witty abrupt bold curious daring exact fierce
golden honest immense jaunty large merry nimble oval pale rare shiny tiny upbeat valid windy alert
blunt cheerful dense empty frosty grand hasty idle juicy lucky mild new obedient patient ready salty
thick unique violet wild azure brisk cozy dim even fresh grim heavy
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
"""Adjectives for built-in texts; keys and values of needles are "adjective-noun"."""
