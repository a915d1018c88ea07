"""Bad input from a user: the one exception family that the command line turns into a message and exit code 2."""

from __future__ import annotations


class InputError(Exception):
    """The input or the environment is wrong and the user can fix it.

    The message names the file, key, option, field or target that is wrong and says how to correct it. `main()` prints
    it without a traceback and exits with code 2. Subclass it only where a caller has to tell one kind from another.
    """
