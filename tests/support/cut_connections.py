"""Breaks connections of Perseus between this rank and others, as a network device that restarts does."""

import contextlib
import os
import socket

import psutil

from perseus_ds.distributed import groups


class Connected:
    """The sockets of the groups that are made from now on, but for those of pipelines."""

    def __init__(self):
        self._handles = set()
        self._connect = groups._connect
        groups._connect = self._recorded

    def cut(self):
        """Break their connections."""
        groups._connect = self._connect
        assert self._handles & _handles()
        for handle in self._handles & _handles():
            # Its other end, in this process, may be broken already.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _recorded(self, name, place, size):
        before = _handles()
        group = self._connect(name, place, size)
        if "pipeline" not in name:
            self._handles |= _handles() - before
        return group


def _handles():
    """Return the handles of connections of this process."""
    return {found.fd for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED}
