"""What is printed holds no control characters, whatever the files hold that it comes from."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from perseus_ds.artifacts.printable import printable


class PrintableText(io.TextIOBase):
    """A stream that writes what it is given to another one, printable."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def terminal(self) -> TextIO:
        """The stream behind, for what draws on a screen; it must write printable text only."""
        return self._stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write a text; characters that the stream's encoding lacks are written as escapes."""
        safe = printable(text)
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def terminal() -> TextIO:
    """Return the standard output for what draws on a screen; it must write printable text only."""
    return sys.stdout.terminal if isinstance(sys.stdout, PrintableText) else sys.stdout
