"""Loading without noise: progress bars and warnings of transformers would mix with what a command prints."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the block transformers prints nothing below an error; before and after it is as the user has set it. Exceptions pass."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Dequantizing shows a bar of its own that no switch turns off.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
