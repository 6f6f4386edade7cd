"""Hooks of MkDocs.

Formulas between dollar signs are converted to MathML, which browsers draw without a script. Links to files of the
repository, which are not part of the site, are replaced by their paths. Roles in docstrings, such as ``:meth:``, are
left out.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

# Code is matched too, so that dollar signs in it are not changed.
_CODE_OR_FORMULA = re.compile(r"^```.*?^```|`[^`\n]*`|^\$\$\n(.*?)\n\$\$$|\$([^$\n]+)\$", re.MULTILINE | re.DOTALL)
_RELATIVE_LINK = re.compile(r"\[`?([^\]`]+)`?\]\(((?:\.\./)+)([^)]+)\)")
_ROLE = re.compile(r":(?:class|data|func|meth):<code>~?(?:[a-z_]+\.)*")
_PLACEHOLDER = re.compile(r"FORMULA([BI])([0-9a-f]+)END")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to the repository, and hide formulas from Markdown, where underscores have a meaning."""
    folders = page.file.src_uri.count("/")
    hidden = _CODE_OR_FORMULA.sub(_hidden, markdown)
    return _RELATIVE_LINK.sub(lambda match: _path(match) if match[2].count("/") > folders else match[0], hidden)


def on_page_content(html: str, **_: Any) -> str:
    """Insert the formulas into the page, and leave out the roles of docstrings."""
    return _ROLE.sub("<code>", _PLACEHOLDER.sub(_drawn, html))


def _path(match: re.Match[str]) -> str:
    text, _, path = match.groups()
    return f"`{path}`" if text in path else f"{text} (`{path}`)"


def _hidden(match: re.Match[str]) -> str:
    block, inline = match.groups()
    formula = block or inline
    return f"FORMULA{'B' if block else 'I'}{formula.encode().hex()}END" if formula else match[0]


def _drawn(match: re.Match[str]) -> str:
    kind, formula = match.groups()
    return convert(bytes.fromhex(formula).decode(), display="block" if kind == "B" else "inline")
