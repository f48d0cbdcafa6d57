"""Recipes: the options that a resumed run must share with the run that saved its checkpoint, and texts on changes."""

from __future__ import annotations

from typing import Any

from reshard.errors import ArgumentError

#: By option: the effect of another value in a resumed run.
_EFFECTS = {
    "steps": "the learning rate follows the new number from here on, so the run differs from an uninterrupted one",
    "warmup": "the learning rate follows the new number from here on, so the run differs from an uninterrupted one",
    "data": "the run reads the other file from this step on",
    "autocast": "the run computes in the other dtype from here on",
    "compression": "the other codecs are used from here on",
    "order": "ranks compute in the other order from here on, with the same results",
}


def describe_changes(changes: list[tuple[str, Any, Any]], trains: bool) -> list[str]:
    """The differences from the run that saved the checkpoint, and their consequences: a line for each option.

    Without a step to train (``trains``), there are none.

    Raises:
        ArgumentError: the peak learning rate differs. The checkpoint has its own, so another one would have no effect.
    """
    lines = []
    for option, saved, value in changes:
        if option == "learning-rate":
            raise ArgumentError(
                f"the checkpoint was saved with --learning-rate {saved}, not {value}; resumed runs keep theirs: pass "
                f"--learning-rate {saved}, or start again in another folder"
            )
        if not trains:
            continue
        before, now = (f"--{option} {text}" if text != "" else f"no --{option}" for text in (saved, value))
        lines.append(f"the checkpoint was saved with {before}, not {now}: {_EFFECTS[option]}")
    return lines
