"""The handle of a transfer whose tensors travel as buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reshard.api.lossless.lossless_transfer import EncodingReport
from reshard.api.transfers.handle import ConfirmedHandle, Handle
from reshard.errors import ReshardError
from reshard.public_api import not_compiled


class LosslessHandle(ConfirmedHandle):
    """A transfer of buckets. Every rank must call :meth:`wait`, which confirms the data and decodes it.

    Attributes:
        report: how the tensors are sent.
    """

    def __init__(
        self,
        inner: Handle,
        report: EncodingReport,
        complete: Callable[[ReshardError | None], None],
        finish: Callable[[], Any],
    ) -> None:
        super().__init__(inner, finish)
        self._complete = complete
        self._is_complete = False
        self.report = report

    @not_compiled
    def wait(self, timeout_seconds: float | None = None) -> Any:
        """Wait as :meth:`Handle.wait` does. Then confirm with the other ranks that all data has arrived, and decode it.

        ``timeout_seconds`` limits only the wait for this rank's buckets. The timeout of the call limits the rest.

        Raises:
            ReshardError: a rank failed; the same on every rank. Unless it failed to decode, every ``out`` is unchanged.
        """
        self._wait_for_part(timeout_seconds)
        with self._finishing:
            if not self._is_complete and self._interruption is None:
                try:
                    self._final_error, self._is_complete = self._confirm(self._complete), True
                except BaseException as error:
                    self._interruption = type(error).__name__
                    raise
        if self._final_error is not None:
            raise self._final_error
        return self._take_result()
