"""The largest text that fits a number of tokens. Knows nothing about what the text is."""

from __future__ import annotations

from collections.abc import Callable


def largest_size(count: Callable[[int], int], budget: int) -> int:
    """The size whose count fits the budget while the next larger one's does not; 0 where not even size 1
    fits.

    `count` grows about linearly: false position with at least one step a side, so a few calls do.
    """
    fits, fits_count = 1, count(1)
    if fits_count > budget:
        return 0
    fails, rate = None, (count(33) - fits_count) / 32
    while fails is None or fails - fits > 1:
        guess = fits + max(1, int((budget - fits_count) / max(rate, 1e-3)))
        if fails is not None:
            guess = min(guess, fails - 1)
        guess_count = count(guess)
        if guess > fits:
            rate = max((guess_count - fits_count) / (guess - fits), 0.1)
        if guess_count <= budget:
            fits, fits_count = guess, guess_count
        else:
            fails = guess
    return fits
