"""Every rank's report of an iteration to rank 0, and what all are told of it, while the next iteration runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from perseus_ds.artifacts.rank_report import ALIKE, JobReport, RankReport, RankReports
from perseus_ds.distributed import MOST_MESSAGE_BYTES, Communicator, Pending, Widths


class ReportExchange:
    """Sends this rank's report of one iteration after the other; every rank must do so at the same boundaries.

    Args:
        communicator: All ranks.

    Attributes:
        ranks: On rank 0, the reports of all ranks that were received last; None elsewhere.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.ranks: RankReports | None = None
        self._communicator = communicator
        self._pending: Pending | None = None
        self._arrived: RankReports | None = None
        # Bytes of events that ranks may send with their next report: as many as they have said to have.
        self._event_bytes = 0

    def send(self, report: RankReport, stretch_factors: Sequence[float] = ()) -> None:
        """Begin to send this rank's report, and its events if all ranks know that there are some; returns at once.

        Args:
            report: Of this rank.
            stretch_factors: Rank 0's decision: of each pipeline; none for 1 throughout.
        """
        answers = partial(self._answers, stretch_factors)
        widths = Widths(ALIKE, 1, min(self._event_bytes, MOST_MESSAGE_BYTES))
        self._pending = self._communicator.start_exchange(report.as_numbers(), answers, widths)

    def received(self) -> JobReport | None:
        """Return what all ranks are told of the reports sent last; None if there are none, or it was returned already.

        All ranks sent them an iteration ago, so this does not wait.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else self._told(pending)

    def look_within(self, timeout_s: float) -> JobReport | None:
        """Return the same without taking it; None too where a rank is gone before it has sent its own."""
        try:
            if self._pending is None or not self._pending.is_there_within(timeout_s):
                return None
            return self._told(self._pending)
        except RuntimeError:  # the connection to a rank that is gone
            return None

    def _told(self, pending: Pending) -> JobReport | None:
        numbers = pending.result()
        self.ranks = self._arrived
        told = None if np.isnan(numbers).all() else JobReport.from_numbers(numbers.tolist())
        self._event_bytes = 0 if told is None else told.event_bytes
        return told

    def _answers(
        self, stretch_factors: Sequence[float], numbers: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return what all ranks are told of the job, and for each of them the stretch factor of its own pipeline."""
        ranks = self._arrived = RankReports(numbers, self._communicator.pipeline_of_rank)
        factors = np.asarray(stretch_factors)[ranks.pipeline_of_rank] if stretch_factors else np.ones(len(numbers))
        return np.array(JobReport.of(ranks).as_numbers()[:ALIKE]), factors[:, None]
