"""HTML and SVG whose texts are escaped by construction."""

from __future__ import annotations

import html

_VOID = {"input", "link", "meta", "wbr"}


class Markup(str):
    """Text that is markup already; `tag` and `joined` escape every other text."""

    __slots__ = ()


def joined(*parts: str | None) -> Markup:
    """Put parts one after the other; None is left out."""
    return Markup(
        "".join(
            part if isinstance(part, Markup) else html.escape(part)
            for part in parts
            if part is not None
        )
    )


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """Return one element; `class_` means class, `aria_label` aria-label, None is left out."""
    opening = name
    for key, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
            opening += f' {key.rstrip("_").replace("_", "-")}="{html.escape(text)}"'
    return Markup(f"<{opening}>" if name in _VOID else f"<{opening}>{joined(*children)}</{name}>")
