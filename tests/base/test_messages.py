"""Messages can be read in one file, and texts keep to plain technical English."""

from __future__ import annotations

import ast

from tests.support.messages import AVOIDED, SNAPSHOT, avoided_wording, messages_in, snapshot

ALLOWED = 0
"""How many avoided wordings are left in the sources: lower it with every text that is rewritten."""


def test_the_snapshot_of_all_messages_is_current() -> None:
    assert SNAPSHOT.read_text("utf-8") == snapshot(), "run: make messages"


def test_no_new_text_uses_wording_that_is_avoided() -> None:
    found = avoided_wording()
    assert len(found) <= ALLOWED, "\n".join(found)
    assert len(found) == ALLOWED, f"set ALLOWED to {len(found)}"


def test_messages_are_found_with_their_placeholders() -> None:
    code = 'raise ValueError(f"{n} is wrong. " + help)\nwarnings.warn("slow", stacklevel=2)'
    assert sorted(messages_in(ast.parse(code))) == [
        ("ValueError", "{n} is wrong. {help}"),
        ("warning", "slow"),
    ]


def test_avoided_wording_is_recognized() -> None:
    for text in ("Say whether it fits", "3 is no rank", "made anew", "nobody", "trains beside it"):
        assert AVOIDED.search(text), text
    assert not AVOIDED.search("Return whether the rank is not positive")
