"""Attacks on the port of the metrics and the status page: the family "http", and "http-tls" on a service that speaks
TLS. During each of them the port answers others."""

import contextlib
import http.client
import os
import random
import socket
import ssl
import threading
import time

from tls_attacks import CLIENT_HELLO_START
from wire import MEBI

SECONDS = 10  # For an answer that takes milliseconds.
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
OTHER_HOST = "127.0.0.77"  # An honest peer is here, and another one at the attackers' host.


def connect(target):
    return socket.create_connection(target.pages, timeout=SECONDS)


def trusting():
    return ssl.create_default_context(cafile=os.environ["BALLAST_TLS_CA"])


def encrypted(target):
    return trusting().wrap_socket(connect(target), server_hostname="localhost")


def speak(target):
    """A connection as honest peers have one: with TLS, where the port speaks that."""
    return encrypted(target) if target.pages_speak_tls else connect(target)


def check_live(target):
    for source in ("127.0.0.1", OTHER_HOST):
        more = {"timeout": SECONDS, "source_address": (source, 0)}
        peer = http.client.HTTPSConnection("localhost", target.pages[1], context=trusting(), **more) \
            if target.pages_speak_tls else http.client.HTTPConnection(*target.pages, **more)
        with contextlib.closing(peer):
            peer.request("GET", "/live")
            if (answer := peer.getresponse().read()) != b"live\n":
                raise AssertionError(f"the port answers {source}: {answer!r}")


def answer(peer):
    """(status, the text) of what a peer is answered; none if it is left without."""
    data = b""
    with contextlib.suppress(OSError):
        while more := peer.recv(1 << 16):
            data += more
    head, _, text = data.partition(b"\r\n\r\n")
    return [(head.split()[1].decode(), text.decode())] if head.startswith(b"HTTP/1.1 ") else []


def ask(target, data):
    with contextlib.suppress(OSError), speak(target) as peer:
        with contextlib.suppress(OSError):  # It may have heard enough.
            peer.sendall(data)
        return [(code, text.strip()) for code, text in answer(peer) if code not in ("200", "401")]
    return []


def held(target, count, data, open_one=connect):
    """Connections that say so much, and nothing more. The oldest are closed when there are too many."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            with contextlib.suppress(OSError):
                stack.enter_context(open_one(target)).sendall(data)
        check_live(target)
    return []


def slow_bytes(target):
    """Byte by byte, without an end."""
    first = CLIENT_HELLO_START if target.pages_speak_tls else GET
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(target)) for _ in range(60)]
        for at in range(len(first) - 4):
            for peer in peers:
                with contextlib.suppress(OSError):  # The service has had enough of one that is too slow.
                    peer.sendall(first[at:at + 1])
            if at % 10 == 0:
                check_live(target)
            time.sleep(0.02)
    return []


def no_readers(target):
    """They ask for all that is large, again and again, and read nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            with contextlib.suppress(OSError):
                peer = stack.enter_context(speak(target))
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        check_live(target)
    return []


def flood(target, path):
    """Whole requests, as many as there can be in a second."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    end = time.monotonic() + 1

    def attack():
        while time.monotonic() < end:
            with contextlib.suppress(OSError), speak(target) as peer:
                peer.sendall(request)
                answer(peer)

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    check_live(target)
    for thread in threads:
        thread.join()
    return []


def one_after_another(target, count):
    for _ in range(count):
        connect(target).close()
    check_live(target)
    return []


def body_without_end(target):
    with contextlib.suppress(OSError), speak(target) as peer:
        peer.sendall(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4294967296\r\n\r\n")
        for _ in range(64):
            peer.sendall(bytes(MEBI))
    check_live(target)
    return []


LINE = b"GET / HTTP/1.1\r\n"
REQUESTS = {
    "a header of 1 MiB": LINE + b"A: " + b"a" * MEBI + b"\r\n\r\n",
    "100,000 headers": LINE + b"A: b\r\n" * 100_000 + b"\r\n",
    "a path of 1 MiB": b"GET /" + b"a" * MEBI + b" HTTP/1.1\r\n\r\n",
    "no host": LINE + b"\r\n",
    "two hosts": LINE + b"Host: a\r\nHost: b\r\n\r\n",
    "another host": LINE + b"Host: evil.example\r\n\r\n",
    "a line that goes on": LINE + b"Host: localhost\r\nA: b\r\n c\r\n\r\n",
    "a job's name with a line's end": b"GET /api/job?job=a%0ab%1b[31m HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a job's name of 10 KB": b"GET /api/job?job=" + b"n" * 10000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a token that is none": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \r\n\r\n",
    "a token of 10 KB": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"t" * 10000 + b"\r\n\r\n",
    "8 KB of ranges": LINE + b"Host: localhost\r\nRange: bytes=1-" + b",1-" * 2700 + b"\r\n\r\n",
    "a path that leads out": b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another method": b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "NULs": bytes(100_000),
    "noise": random.Random(11).randbytes(100_000),
}


def common_family():
    for what, data in REQUESTS.items():
        yield what, lambda target, data=data: ask(target, data)
    yield "1,500 silent connections", lambda target: held(target, 1500, b"")
    yield "bytes one by one", slow_bytes
    yield "200 requests that stop", lambda target: held(target, 200, GET[:-2], speak)
    yield "60 peers that do not read", no_readers
    for path in ("/metrics", "/"):
        yield f"a flood of {path}", lambda target, path=path: flood(target, path)
    yield "a body without an end", body_without_end
    yield "1,000 connections one after another", lambda target: one_after_another(target, 1000)


def tls_family():
    yield from common_family()
    yield "400 handshakes that stop", lambda target: held(target, 400, CLIENT_HELLO_START + bytes(165))
    yield "100 handshakes and nothing more", lambda target: held(target, 100, b"", encrypted)
    yield "no TLS", lambda target: held(target, 300, b"\x80\x01nonsense\r\n\r\n")
