"""Megatron's ``--pipeline-model-parallel-layout`` string and the layers of each stage that it stands for.

Grammar, from ``megatron/core/transformer/pipeline_parallel_layer_layout.py``: ``E`` embedding, ``t`` transformer layer,
``m`` multi-token-prediction layer, ``L`` loss (the head); ``|`` between stages; first ``(...)*n`` and then ``x*n``
repeat; commas are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_balance.errors import BalanceError

# Groups before single letters, as Megatron does: in "(t*2|)*3" the group repeats first.
_REPETITIONS = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_MOST_LETTERS = 100_000  # a slip of the keyboard must not fill the memory
_MEANING = "E (embedding), t (layer), m (multi-token prediction), L (loss), | (next stage), x*n and (...)*n (repeat)"


@dataclass(frozen=True)
class Layout:
    """Layers of each stage, in the order in which data passes the stages.

    The embedding is in the first stage and the head in the last: Megatron places both by rank, wherever the letters
    stand.

    Attributes:
        layers: transformer layers of each stage.
        mtp: multi-token-prediction layers of each stage; all in one stage.
    """

    layers: tuple[int, ...]
    mtp: tuple[int, ...]

    @classmethod
    def of(cls, layers: Sequence[int], mtp_num_layers: int = 0, mtp_stage: int | None = None) -> Layout:
        """The layout with the multi-token-prediction layers in ``mtp_stage``; None: beside the head, where every Megatron
        accepts them.
        """
        mtp = [0] * len(layers)
        mtp[-1 if mtp_stage is None else mtp_stage] = mtp_num_layers
        return cls(tuple(layers), tuple(mtp))

    @property
    def mtp_stage(self) -> int:
        """The stage of the multi-token-prediction layers; the last where there are none."""
        return next((stage for stage, count in enumerate(self.mtp) if count), len(self.mtp) - 1)

    def empty_ranks(self, pipeline_size: int) -> list[int]:
        """Pipeline ranks between the first and the last that hold nothing."""
        held = [layers + mtp for layers, mtp in zip(self.layers, self.mtp, strict=True)]
        return [rank for rank in range(1, pipeline_size - 1) if not any(held[rank::pipeline_size])]

    def __str__(self) -> str:
        """The string for Megatron: fully expanded, which all versions read alike."""
        stages = ["t" * layers + "m" * mtp for layers, mtp in zip(self.layers, self.mtp, strict=True)]
        return f"E{'|'.join(stages)}L"


def parse_layout(text: str) -> Layout:
    """Read a layout string, with the checks that Megatron makes.

    Raises:
        BalanceError: Megatron would refuse the string.
    """
    letters = text.replace(",", "")
    for repetition in _REPETITIONS:
        if sum(len(body) * int(times[:9]) for body, times in repetition.findall(letters)) > _MOST_LETTERS:
            raise BalanceError(
                f"pipeline layout {text[:60]!r} is too long: no model has more than {_MOST_LETTERS} layers"
            )
        letters = repetition.sub(lambda match: match[1] * int(match[2]), letters)
    unknown = sorted(set(letters) - set("EtmL|"))
    if unknown:
        raise BalanceError(
            f"pipeline layout {text!r} holds {', '.join(map(repr, unknown))} after its repetitions are written out: "
            f"use only {_MEANING}, without spaces or nesting"
        )
    _check_letters(text, letters.replace("|", ""))
    stages = letters.split("|")
    if sum("m" in stage for stage in stages) > 1:
        raise BalanceError(f"pipeline layout {text!r} spreads m over several stages: put all m into one stage")
    return Layout(tuple(stage.count("t") for stage in stages), tuple(stage.count("m") for stage in stages))


def _check_letters(text: str, chain: str) -> None:
    """Refuse a chain of elements that is not E, then all t, then all m, then L."""
    for letter, place, name in (("E", 0, "first"), ("L", -1, "last")):
        if chain.count(letter) != 1 or chain[place] != letter:
            raise BalanceError(
                f"pipeline layout {text!r} has {chain.count(letter)} {letter}: it needs exactly one, as its {name} "
                "letter"
            )
    if "t" in chain[chain.find("m") :] and "m" in chain:
        raise BalanceError(f"pipeline layout {text!r} has t after m: put all m behind the last t")
