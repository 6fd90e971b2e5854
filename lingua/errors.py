"""The one exception a user's mistake raises."""


class UserError(ValueError):
    """Something the user can put right: bad config, data, checkpoint or environment.

    The message says what is wrong, where, what was found, what was expected and what to do.
    Commands print it as one line (:func:`lingua.args.cli`), without a traceback.
    """


def check_fields(section: str, args: object, checks: dict[str, tuple[bool, str]]) -> None:
    """Raise UserError at the first field of ``args`` that does not hold.

    Args:
        section: name of the config section, for the message.
        checks: by field, whether its value is usable, and what is expected otherwise. Write conditions so that NaN
            fails them.
    """
    for name, (holds, expected) in checks.items():
        if not holds:
            raise UserError(f"{section}.{name}={getattr(args, name)}: expected {expected}")
