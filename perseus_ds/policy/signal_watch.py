"""Reads the files of signals when they change, on a thread of its own; on rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perseus_ds.errors import SignalError
from perseus_ds.policy.policies import PolicyConfig, signal_files
from perseus_ds.policy.signal_files import read_signal
from perseus_ds.policy.signal_values import Signal
from perseus_ds.timebase import Flag, Timebase

_LOOK_EVERY_S = 1.0
_PATIENCE_S = 10.0
_Signature = tuple[int, int, int]
_NEVER: _Signature = (0, 0, 0)


@dataclass(eq=False)
class _File:
    """A file that is watched.

    Attributes:
        path: Where it is.
        read: Signature of the contents that are in use; None if it was not there.
        suspect: Signature of the contents that were wrong when last looked at.
        told: Signature of the contents that a problem was told of.
    """

    path: str
    read: _Signature | None
    suspect: _Signature | None = _NEVER
    told: _Signature | None = _NEVER


class SignalWatch:
    """Keeps the last good values of the signals of a policy.

    Training threads never read a file: they take the values that are there.

    Attributes:
        signals: The last good values, by file.
    """

    def __init__(self, timebase: Timebase, on_problem: Callable[[str], None]) -> None:
        """Watch nothing yet.

        Args:
            timebase: The time that the rank lives in.
            on_problem: Told what is wrong with a file that has changed; on another thread.
        """
        self.signals: Mapping[str, Signal] = {}
        self._timebase = timebase
        self._on_problem = on_problem
        self._changed = timebase.condition()
        self._is_closed = False
        self._is_watching = False
        self._watched: list[_File] = []

    def follow(self, policy: PolicyConfig) -> None:
        """Read the signals of a policy, and watch their files from now on.

        Raises:
            SignalError: A file cannot be used; the signals are those from before.
        """
        files = signal_files(policy)
        found = {file: self._read_beside(file) for file in files}
        with self._changed:
            self._watched = [_File(file, signature) for file, (signature, _) in found.items()]
            # The policy from before may decide once more.
            read = {file: signal.continuing(self.signals.get(file)) for file, (_, signal) in found.items()}
            self.signals = {**self.signals, **read}
            begins = bool(files) and not self._is_watching and not self._is_closed
            self._is_watching = self._is_watching or begins
        if begins:
            self._timebase.thread(self._watch, "perseus-signals").start()

    def follow_if_possible(self, policy: PolicyConfig) -> None:
        """Do the same, but only tell of a file that cannot be used."""
        try:
            self.follow(policy)
        except SignalError as error:
            self._on_problem(str(error))

    def close(self) -> None:
        """Stop; harmless when called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _read_beside(self, file: str) -> tuple[_Signature | None, Signal]:
        """Read a file on another thread, since a file system may hang."""
        done = Flag(self._timebase)
        found: list[tuple[_Signature | None, Signal] | SignalError] = []

        def read() -> None:
            try:
                found.append((_signature(file), self._read(file)))
            except SignalError as error:
                found.append(error)
            finally:
                done.set()

        self._timebase.thread(read, "perseus-signal").start()
        done.wait(_PATIENCE_S)
        if not found:
            raise SignalError(f"{file}: the signal cannot be read: no answer for {_PATIENCE_S:.0f} s.")
        if isinstance(found[0], SignalError):
            raise found[0]
        return found[0]

    def _read(self, file: str) -> Signal:
        try:
            return read_signal(Path(file), self._timebase.date())
        except SignalError:
            raise
        except Exception as error:  # whatever a file holds, the thread goes on
            raise SignalError(f"{file}: the signal cannot be read ({error!r}).") from error

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_LOOK_EVERY_S)
                if self._is_closed:
                    return
                watched = list(self._watched)
            for file in watched:
                self._look(file)

    def _look(self, file: _File) -> None:
        """Read a file that has changed; one that is wrong may be half written, and is told of if it stays so."""
        signature = _signature(file.path)
        if signature in (file.read, file.told):
            return
        try:
            signal = self._read(file.path)
        except SignalError as error:
            if signature == file.suspect:
                file.told = signature
                self._on_problem(f"{error} The last good values stay in use")
            file.suspect = signature
            return
        file.read, file.told = signature, _NEVER
        with self._changed:
            if file in self._watched and signal != self.signals[file.path]:
                self.signals = {**self.signals, file.path: signal.continuing(self.signals[file.path])}


def _signature(path: str) -> _Signature | None:
    """Return what differs when a file has changed; None if it is not there."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name may hold characters that no name has
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
