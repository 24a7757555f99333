"""Where the documents of the next global batch begin: kept beside every checkpoint, read when one is resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.found_checkpoint import loads, text_beside
from megatron_balance.megatron.packed.planner import Planner
from megatron_balance.megatron.packed.totals import told
from megatron_balance.packing.stream import Cursor, Stream
from megatron_balance.pipeline.stored import FILE_NAME, StoredLayout
from megatron_balance.reading import DamageError

_REMEDY = "load another with --ckpt-step, or give --finetune to begin with the first document"


def start(args: Any, stream: Stream) -> tuple[int, Cursor]:
    """The item that training begins with, and where its global batch begins.

    Raises:
        BalanceError: a checkpoint is resumed in the middle of training that says nothing of this, or is of other data.
    """
    item = args.consumed_train_samples
    if item == 0 or not loads(args):
        return item, stream.start
    name = f"{FILE_NAME} beside the checkpoint in {args.load}"
    text = text_beside(args)
    try:
        packing = None if text is None else StoredLayout.from_json(text, name).packing
        cursor = None if packing is None else Cursor.from_json(packing)
    except DamageError as damage:
        raise BalanceError(f"{name} {damage}: {_REMEDY}") from damage
    except BalanceError as error:
        raise BalanceError(f"{error}: {_REMEDY}") from error
    if cursor is None:
        raise BalanceError(_unknown(item, args.load, text is None))
    cursor = _padded_as(stream, cursor)
    stream.check(cursor)
    return item, cursor


def at(item: int, planner: Planner, stream: Stream) -> Cursor:
    """Where the global batch begins that item ``item`` begins; the planner cuts up to there only where no item has told it."""
    table = told.cursor_table(item)
    return planner.cursor(item) if table is None else Cursor.of_table(stream.identity, table)


def _unknown(item: int, folder: str, is_missing: bool) -> str:
    seen = f"the checkpoint in {folder} has seen {item} samples"
    if is_missing:
        return (
            f"{seen}, and which documents these were is kept in {FILE_NAME} beside it, which is not there or cannot be read: copy"
            f" it with the checkpoint; where it is lost or was never written, {_REMEDY}, or leave --varlen-packing out if the"
            " checkpoint was trained without"
        )
    return (
        f"{seen}, but by its {FILE_NAME} was not trained with --varlen-packing: which documents these were cannot be told. Give"
        " --finetune to begin with the first document, or leave --varlen-packing out"
    )


def _padded_as(stream: Stream, cursor: Cursor) -> Cursor:
    """The cursor for the alignment of this job: context parallelism pads pieces, but changes neither them nor their order."""
    rule = replace(cursor.identity.rule, alignment=stream.rule.alignment)
    return replace(cursor, identity=replace(cursor.identity, rule=rule))
