"""Breaks connections of Perseus between this rank and others, as a network device that restarts does."""

import contextlib
import os
import socket

import psutil
import torch.distributed as dist


class Connected:
    """The sockets by which clients of key-value stores are connected that are made from now on."""

    def __init__(self):
        self._handles = set()
        self._make = dist.TCPStore
        dist.TCPStore = self._recorded

    def stop(self):
        """Leave out those that are made from now on."""
        dist.TCPStore = self._make

    def cut(self):
        """Break their connections."""
        self.stop()
        assert self._handles & _handles()
        for handle in self._handles & _handles():
            # Its other end, in this process, may be broken already.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _recorded(self, *arguments, **named):
        before = _handles()
        store = self._make(*arguments, **named)
        self._handles |= _handles() - before
        return store


def _handles():
    """Return the handles of connections of this process."""
    return {found.fd for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED}
