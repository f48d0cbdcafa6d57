"""Collectives that are under way, and the order in which they add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reshard.errors import ReshardError

#: Converts the error of a collective into an error of this package. Its arguments: the awaited ranks, and whether this
#: rank waits in a backward.
Explain = Callable[[RuntimeError, Sequence[int], bool], ReshardError]
#: Dtypes whose values are added in float32.
SHORT_DTYPES = (torch.bfloat16, torch.float16)
#: Tensors that follow each other along dim 0.
Parts = Sequence[torch.Tensor]


class PendingResult:
    """The result of a collective that is under way."""

    def __init__(
        self,
        work: Any,
        finish: Callable[[], torch.Tensor],
        explain: Callable[[RuntimeError], ReshardError] | None = None,
    ) -> None:
        self._work, self._finish, self._explain = work, finish, explain

    def wait(self) -> torch.Tensor:
        """The result.

        Raises:
            RemoteError: a rank failed, or did not call the collective within the time-out of the process group.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                if isinstance(error, ReshardError) or self._explain is None:
                    raise
                raise self._explain(error) from error
        return self._finish()


def ordered_sum(parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum over dim 0, one part after the other; bf16 and fp16 are added in float32."""
    dtype = parts[0].dtype
    first = parts[0].float() if dtype in SHORT_DTYPES else parts[0]
    result = first.clone() if len(parts) == 1 else first + parts[1]
    for part in parts[2:]:
        result += part
    return result.to(dtype)
