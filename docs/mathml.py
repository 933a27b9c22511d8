"""An mkdocs hook: formulas become MathML when pages are built, so that readers need no script from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)


def on_page_content(content: str, **kwargs: Any) -> str:
    """The HTML of a page with each formula of pymdownx.arithmatex replaced."""
    return FORMULA.sub(lambda found: _mathml(found[2], found[1] == "div"), content)


def _mathml(formula: str, block: bool) -> str:
    text = html.unescape(formula)
    tag = re.search(r"\\tag\{(.*?)\}", text)
    drawn = convert(text.replace(tag[0], "") if tag else text, display="block" if block else "inline")
    return f"<div>{drawn}{f' ({tag[1]})' if tag else ''}</div>" if block else drawn
