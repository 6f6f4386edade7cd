"""What is printed holds no control characters, whatever the files hold that it comes from."""

from __future__ import annotations

import io
from typing import TextIO


def printable(text: str) -> str:
    """Return a text in which each control character, and each lone half of a surrogate pair, is written as its escape.

    Terminals take sequences of control characters for commands. The ends of lines and tabs stay.
    """
    return "".join(c.encode("unicode_escape").decode() if _is_control(c) else c for c in text)


def _is_control(character: str) -> bool:
    if character in "\n\t":
        return False
    return character < " " or "\x7f" <= character <= "\x9f" or "\ud800" <= character <= "\udfff" or character in _BIDI


# These change the order in which a terminal shows what follows.
_BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class PrintableText(io.TextIOBase):
    """A stream that writes what it is given to another one, printable."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def stream(self) -> TextIO:
        """The other stream, for those who write control characters of their own."""
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
