"""The one error a user can mend: what was wanted, what came, what to do."""


class InputError(ValueError):
    """Bad input from outside - a checkpoint, a prompts file, an option. The command line prints it and exits 2.

    The message is one line: it names what was wanted, what came instead, and what to do about it.
    """
