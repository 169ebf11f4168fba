"""Frames that make the service owe an answer, without an end, of peers that read the answers and of peers that do not:
the family "frames"."""

import concurrent.futures
import contextlib
import socket
import ssl
import struct
import sys
import threading

from wire import JOBS, RawConnection, frame, request, request_headers

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(RawConnection.SETTINGS, 0, 0)
PING = frame(RawConnection.PING, 0, 0, b"12345678")
# What a peer that reads nothing waits for a service that has stopped reading as well.
BLOCKED_SECONDS = 0.5
END_SECONDS = 30
MOST_OWED = 10_000  # gRPC reads no more while it owes as many answers.


def flood(peer, piece, count, before):
    """Sends `piece` `count` times, or until the service reads no more, and reads nothing. Then it reads what there is, to
    the end: by then the service has handled all. Returns how many bytes came."""
    received, most = 0, sys.maxsize
    with peer:
        peer.settimeout(END_SECONDS)
        peer.sendall(PREFACE + before)
        # Every client of gRPC waits for the service's settings. Over TLS, gRPC 1.51 loses bytes of a client that sends more
        # than 17 KB before the server has read the end of the handshake: of 100 such connections 35 ended as corrupt.
        received += len(peer.recv(1 << 16))
        peer.settimeout(BLOCKED_SECONDS)
        with contextlib.suppress(OSError):
            at_once = max((1 << 16) // len(piece), 1)
            for _ in range(0, count, at_once):
                peer.sendall(piece * at_once)
        peer.settimeout(END_SECONDS)
        with contextlib.suppress(OSError):
            if isinstance(peer, ssl.SSLSocket):  # Which cannot end one half of itself.
                most = MOST_OWED * len(PING)
            else:
                peer.shutdown(socket.SHUT_WR)
            while received < most and (data := peer.recv(1 << 16)):
                received += len(data)
    return received


def unread(target, piece, count, before=b"", connections=1, connect=lambda target: RawConnection(
        target.address, preface=False).socket):
    with concurrent.futures.ThreadPoolExecutor(connections) as pool:
        floods = [pool.submit(flood, connect(target), piece, count // connections, before) for _ in range(connections)]
        received = min(each.result() for each in floods)
    if piece == PING and received < MOST_OWED * len(PING):
        raise AssertionError(f"only {received} bytes of answers to {count} pings came")
    return target.errors(JOBS + "ListJobs", b"")


def read(target, count):
    """Each ping is answered, and so is a call after all of them."""
    with RawConnection(target.address) as raw:
        sender = threading.Thread(target=lambda: raw.send(PING * count + request(JOBS + "ListJobs", 1)))
        sender.start()
        answers, calls = 0, 0
        for kind, flags, stream, _ in raw.frames(seconds=END_SECONDS):
            answers += kind == raw.PING and flags == 1
            calls += kind == raw.HEADERS and stream == 1
            if answers == count and calls:
                break
        sender.join()
    if answers != count or not calls:
        raise AssertionError(f"{answers} of {count} pings were answered, and {'a' if calls else 'no'} call after them")
    return []


def honest_pings(target, count):
    """A client that asks again and again whether the service is there, as keepalive and measures of bandwidth do."""
    with RawConnection(target.address) as raw:
        raw.await_service()
        for number in range(count):
            raw.send(PING)
            if not any(kind == raw.PING and flags == 1 for kind, flags, _, _ in raw.frames(seconds=END_SECONDS)):
                raise AssertionError(f"ping {number} was not answered")
    return []


OPEN = frame(RawConnection.HEADERS, RawConnection.END_HEADERS, 1, request_headers(JOBS + "GetJob"))
# (What, a frame, what comes before it.)
OWED = (
    ("settings", frame(4, 0, 0, b"\x00\x04\x00\x00\xff\xff"), b""),
    ("settings that open and close windows",
     frame(4, 0, 0, b"\x00\x04\x00\x00\xff\xff") + frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x00"), OPEN),
    ("pings beside a call", PING, OPEN),
    ("answers to pings that there were none of", frame(6, 1, 0, b"12345678"), b""),
    ("windows of a connection", frame(8, 0, 0, struct.pack(">I", 1)), b""),
    ("windows of a stream", frame(8, 0, 1, struct.pack(">I", 1)), OPEN),
    ("windows of no stream", frame(8, 0, 99, struct.pack(">I", 1)), b""),
    ("data of no stream", frame(0, 0, 99, b"x"), b""),
    ("resets of no stream", frame(3, 0, 99, struct.pack(">I", 8)), b""),
    ("goaways", frame(7, 0, 0, bytes(4) + struct.pack(">I", 11) + b"x" * 100), b""),
)


def family():
    yield "200 pings of an honest client", lambda target: honest_pings(target, 200)
    yield "100,000 pings, and all answers read", lambda target: read(target, 100_000)
    yield "200,000 pings, and no answer read", lambda target: unread(target, PING, 200_000)
    yield "a million pings on four connections", lambda target: unread(target, PING, 1_000_000, connections=4)
    for what, piece, before in OWED:
        yield f"100,000 {what}", \
            lambda target, piece=piece, before=before: unread(target, piece, 100_000, before)
