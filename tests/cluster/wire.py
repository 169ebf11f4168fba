#!/usr/bin/env python3
"""A host's wire that is slow and loses packets, for kernels without tc's netem.

    wire.py END PORT DELAY LOSS

makes two network devices. What is sent into END comes out of PORT after DELAY seconds, except a share of LOSS; what
is sent into PORT comes out of END at once. Prints "wire is open" when both are there. They go with this process.
"""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

SET_NAME = 0x400454CA  # TUNSETIFF
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
LONGEST_FRAME = 65536
MOST_UNDER_WAY = 10_000  # Frames. More are lost, as in a switch.


def device(name):
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, SET_NAME, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return tap


def send(tap, frame):
    try:
        os.write(tap, frame)
    except OSError:
        pass  # The device is down or full: the frame is lost.


def forward(end, port, delay, loss):
    draw = random.Random(1)
    under_way = collections.deque()  # (When it arrives, the frame).
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([end, port], [], [], wait)
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            send(port, under_way.popleft()[1])
        for tap in readable:
            try:
                frame = os.read(tap, LONGEST_FRAME)
            except OSError:
                continue  # Not up yet.
            if tap == port:
                send(end, frame)
            elif draw.random() >= loss and len(under_way) < MOST_UNDER_WAY:
                under_way.append((now + delay, frame))


def main():
    end, port = device(sys.argv[1]), device(sys.argv[2])
    print("wire is open", flush=True)
    forward(end, port, float(sys.argv[3]), float(sys.argv[4]))


if __name__ == "__main__":
    main()
