"""The ranks that layers run at in the running context: a thread, or a task of asyncio."""

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
_KEY = "maestro_lod.active_ranks"  # of the same in torch's own state of a thread


def active_blocks() -> tuple[Block, ...]:
    """Return the blocks that the running context is inside of, the innermost last.

    The backward of accelerators, and deep recursion in it, runs in threads of torch, which have
    torch's state of the thread that called it: checkpointed layers run again in the same blocks.
    """
    blocks = _BLOCKS.get()
    if blocks or torch._C._current_graph_task_id() == -1 or not torch._C._is_key_in_tls(_KEY):
        return blocks
    caller, of_caller = torch._C._get_obj_in_tls(_KEY)
    return blocks if caller == threading.get_ident() else of_caller


@contextmanager
def block_of(ranks: Block) -> Iterator[None]:
    """Let layers run at these ranks inside the `with` block, in the running context alone."""
    _set((*_BLOCKS.get(), ranks))
    try:
        yield
    finally:
        _set(tuple(block for block in _BLOCKS.get() if block is not ranks))


def _set(blocks: tuple[Block, ...]) -> None:
    _BLOCKS.set(blocks)
    torch._C._stash_obj_in_tls(_KEY, (threading.get_ident(), blocks))
