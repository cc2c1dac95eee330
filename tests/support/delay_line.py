"""`delay_line.py DEVICE SECONDS`: a TUN device that gives each packet back later, in order. Says READY first."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PACKET_MAX = 65_536


def main(device: str, delay_s: float) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    print("READY", flush=True)
    under_way: deque[tuple[float, bytes]] = deque()  # when each is due
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        if select.select([tun], [], [], wait_s)[0]:
            under_way.append((time.monotonic() + delay_s, os.read(tun, PACKET_MAX)))
        while under_way and under_way[0][0] <= time.monotonic():
            os.write(tun, under_way.popleft()[1])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
