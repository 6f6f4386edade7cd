"""The one collective of an iteration: every rank's report, sent while the next iteration runs."""

from __future__ import annotations

import numpy as np

from perseus_ds.artifacts.rank_report import RankReport, RankReports
from perseus_ds.distributed import Communicator, Pending


class ReportExchange:
    """Sends this rank's report of one iteration after the other; every rank must do so at the same boundaries.

    Args:
        communicator: All ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pending: Pending | None = None

    def send(self, report: RankReport) -> None:
        """Begin to send this rank's report to all ranks; returns at once."""
        self._pending = self._communicator.start_all_gather(report.as_numbers())

    def received(self) -> RankReports | None:
        """Return the reports of all ranks that were sent last; None if there are none, or they were returned already.

        All ranks sent them an iteration ago, so this does not wait.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else RankReports(np.asarray(pending.result()))

    def look_within(self, timeout_s: float) -> RankReports | None:
        """Return the same without taking it; None too where a rank is gone before it has sent its own."""
        try:
            if self._pending is None or not self._pending.is_there_within(timeout_s):
                return None
            return RankReports(np.asarray(self._pending.result()))
        except RuntimeError:  # the connection to a rank that is gone
            return None
