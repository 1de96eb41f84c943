"""What paceline logs while a block runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class Lines(logging.Handler):
    """Keeps the lines that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    handler = Lines()
    logging.getLogger("paceline").addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger("paceline").removeHandler(handler)
