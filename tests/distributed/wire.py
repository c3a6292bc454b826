# SPDX-License-Identifier: Apache-2.0
"""Bytes that a process has sent, as the kernel counts them: below every library."""

import os
import socket
import struct

# Of struct tcp_info in linux/tcp.h; what is sent again counts in both numbers.
_TCP_INFO_SIZE, _BYTES_SENT, _BYTES_SENT_AGAIN = 256, 200, 208


def bytes_sent():
    """Bytes that went out through the TCP sockets this process has open."""
    places = {number: f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")}
    ends = (n for n, place in places.items() if _target(place).startswith("socket:"))
    return sum(_sent(int(number)) for number in ends)


def _target(place):
    """Where a link of /proc leads; nowhere when its file was just closed."""
    try:
        return os.readlink(place)
    except FileNotFoundError:
        return ""


def _sent(number):
    """Of one socket; 0 where it is not of TCP."""
    with socket.socket(fileno=os.dup(number)) as end:
        if end.type != socket.SOCK_STREAM or end.family == socket.AF_UNIX:
            return 0
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    sent, again = (struct.unpack_from("Q", info, at)[0] for at in (_BYTES_SENT, _BYTES_SENT_AGAIN))
    return sent - again
