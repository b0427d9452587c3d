"""All error and warning messages of the library in one file, for a reviewer to read.

    python -m tests.support.messages           write tests/messages.txt
    python -m tests.support.messages --wording  print texts that the style of this project avoids

Texts are collected from the sources: the first argument of what is raised and of `warnings.warn`,
with `{…}` for what is only known at run time.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "maestro_lod"
SNAPSHOT = ROOT / "tests" / "messages.txt"
AVOIDED = re.compile(
    r"\bSay (whether|what|why)\b|\bWhat (it|the|is|has|a)\b|\banew\b|\bso many\b"
    r"|\b(nobody|somebody)\b|\bbeside\b|(?<!there )\bis no [a-z]+\b|\bgo(es)? on\b"
    r"|\b(as|where) (it|they) (is|are)\b"
)


def text_of(node: ast.expr) -> str | None:
    """Return a text with `{expression}` for what is not constant; None if it is not a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        if left is None and right is None:
            return None
        return (left or f"{{{ast.unparse(node.left)}}}") + (
            right or f"{{{ast.unparse(node.right)}}}"
        )
    if isinstance(node, ast.IfExp):
        body, other = text_of(node.body), text_of(node.orelse)
        return None if body is None and other is None else f"{body or '…'} | {other or '…'}"
    return None


def messages_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the exception or warning and the text of everything that is raised or warned of."""
    for node in ast.walk(tree):
        call: ast.Call | None = None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, kind = node.exc, ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            call, kind = node, "warning"
        if call is not None and call.args:
            text = text_of(call.args[0])
            yield kind, f"{{{ast.unparse(call.args[0])}}}" if text is None else text


def snapshot() -> str:
    """Return all messages, file by file."""
    parts = []
    for path in sorted(SOURCE.rglob("*.py")):
        found = sorted(set(messages_in(ast.parse(path.read_text("utf-8")))))
        if found:
            lines = [f"  {kind}: {' '.join(text.split())}" for kind, text in found]
            parts.append("\n".join([path.relative_to(SOURCE).as_posix(), *lines]))
    return "\n\n".join(parts) + "\n"


def avoided_wording() -> list[str]:
    """Return `file:line: wording` for every avoided wording in a text or docstring of a source."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value.isidentifier():
                    continue  # a key of a file or an option, not a text
                for match in AVOIDED.finditer(node.value):
                    line = node.lineno + node.value.count("\n", 0, match.start())
                    place = path.relative_to(ROOT).as_posix()
                    found.append(f"{place}:{line}: {' '.join(match[0].split())}")
    return found


def main() -> None:
    if "--wording" in sys.argv:
        sys.stdout.write("\n".join([*avoided_wording(), ""]))
    else:
        SNAPSHOT.write_text(snapshot(), "utf-8")


if __name__ == "__main__":
    main()
