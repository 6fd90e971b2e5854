"""The one exception a user's mistake raises."""


class UserError(ValueError):
    """Something the user can put right: bad config, data, checkpoint or environment.

    The message says what is wrong, where, what was found, what was expected and what to do.
    Commands print it as one line (:func:`lingua.args.cli`), without a traceback.
    """
