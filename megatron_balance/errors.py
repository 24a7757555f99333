"""The one exception that a user's mistake raises."""


class BalanceError(ValueError):
    """A request that cannot be carried out.

    The message is for the person who typed the command: it holds the numbers that clash and what to do about it. The
    command line prints it without a traceback and exits with status 2.
    """


class MemoryLack(BalanceError):
    """No split of the model fits the memory that a rank may occupy."""
