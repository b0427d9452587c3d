"""Active ranks of layers, by running context: a thread or an asyncio task."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch

Block: TypeAlias = "Mapping[Any, int]"
"""The ranks of one `with` block, by layer."""

_BLOCKS: ContextVar[tuple[Block, ...]] = ContextVar("maestro_lod.active_ranks", default=())
_KEY = "maestro_lod.active_ranks"  # the key of the blocks in torch's thread-local state


def active_blocks() -> tuple[Block, ...]:
    """Return the blocks around the running code, innermost last.

    On accelerators, and in deep recursion, backward runs in threads of torch. They inherit torch's
    thread-local state, so checkpointed layers run again in the blocks of the calling thread.
    """
    blocks = _BLOCKS.get()
    if blocks or torch._C._current_graph_task_id() == -1 or not torch._C._is_key_in_tls(_KEY):
        return blocks
    caller, inherited = torch._C._get_obj_in_tls(_KEY)
    return blocks if caller == threading.get_ident() else inherited


@contextmanager
def activate_block(ranks: Block) -> Iterator[None]:
    """Run layers at these ranks inside the `with` block, in the running context only."""
    _set((*_BLOCKS.get(), ranks))
    try:
        yield
    finally:
        _set(tuple(block for block in _BLOCKS.get() if block is not ranks))


def _set(blocks: tuple[Block, ...]) -> None:
    _BLOCKS.set(blocks)
    torch._C._stash_obj_in_tls(_KEY, (threading.get_ident(), blocks))
