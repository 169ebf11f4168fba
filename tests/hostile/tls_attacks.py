"""Attacks on a service that speaks TLS and asks who calls, by peers without a token: the family "tls"."""

import contextlib
import os
import socket
import ssl
import time

import frame_attacks
import grpc
import size_attacks
from wire import JOBS, MEBI, TRAIN, RawConnection, frame, gradient, message, request_headers

CLIENT_HELLO_START = bytes.fromhex("16030100c8010000c40303") + bytes(32)


def connect(target):
    host, port = target.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=60)


def half_open(target):
    """Connections that begin a handshake, or do not, and stay."""
    held = []
    for number in range(400):
        held.append(connect(target))
        held[-1].sendall(CLIENT_HELLO_START[:number % len(CLIENT_HELLO_START)])
    target.kept.append(held)  # Until the service has had enough of them.
    return []


def slow_bytes(target):
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(connect(target)) for _ in range(50)]
        for at in range(len(CLIENT_HELLO_START)):
            for peer in peers:
                with contextlib.suppress(ConnectionError):  # The service has had enough of one that is too slow.
                    peer.sendall(CLIENT_HELLO_START[at:at + 1])
            time.sleep(0.02)
    return []


def no_tls(target):
    """HTTP/2 in the clear, and noise."""
    for first in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(4096), b"\x16\x03\x01\xff\xff" + bytes(4096)):
        for _ in range(50):
            with contextlib.suppress(OSError), connect(target) as peer:
                peer.sendall(first)
                while peer.recv(4096):
                    pass
    return []


def one_after_another(target, count):
    for _ in range(count):
        connect(target).close()
    return []


def handshakes(target):
    """Whole ones, which are then left alone."""
    for _ in range(200):
        with contextlib.suppress(OSError), encrypted(target):
            pass
    return []


def encrypted(target, version=None):
    context = ssl.create_default_context(cafile=os.environ["BALLAST_TLS_CA"])
    context.set_alpn_protocols(["h2"])
    if version is not None:
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
    return context.wrap_socket(connect(target), server_hostname="localhost")


def old_versions(target):
    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        try:
            with encrypted(target, version):
                raise AssertionError(f"a handshake of {version.name} was accepted")
        except (ssl.SSLError, ConnectionError):
            pass
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        encrypted(target, version).close()
    return []


def huge_lengths(target):
    """Calls that announce 4 GiB, or send much, without a token."""
    for path in (TRAIN + "Train", JOBS + "CreateJob", JOBS + "AttachWorker"):
        for _ in range(20):
            with contextlib.suppress(OSError), encrypted(target) as peer:
                peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(RawConnection.SETTINGS, 0, 0))
                peer.sendall(frame(RawConnection.HEADERS, RawConnection.END_HEADERS, 1, request_headers(path)))
                peer.sendall(frame(RawConnection.DATA, 0, 1, b"\x00\xff\xff\xff\xff" + bytes(16000)))
                peer.recv(4096)
    return []


def anonymous(target, metadata=None):
    """A connection whose calls have no token, or another."""
    with open(os.environ["BALLAST_TLS_CA"], "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    if metadata is not None:
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(metadata))
    return grpc.secure_channel(target.address, credentials, options=[("grpc.use_local_subchannel_pool", 1)])


def refused_calls(target, metadata=None):
    with anonymous(target, metadata) as connection:
        errors = []
        for number in range(300):
            method, request = ((JOBS + "ListJobs", b""), (JOBS + "CloseJob", message((1, "jobs/honest"))),
                               (JOBS + "CreateJob", bytes(1 << 16)))[number % 3]
            error, _ = target.ask(method, request, connection=connection)
            if error is None or error[0] != "UNAUTHENTICATED":
                raise AssertionError(f"{method} without a token of the service ended with {error}")
            errors.append(error)
        return errors[:3]


def gzip_without_a_token(target):
    with anonymous(target) as connection:
        return target.errors(JOBS + "CreateJob", bytes(30 * MEBI), connection=connection, compression=grpc.Compression.Gzip)


def streams(target):
    """Streams that say a lot before they are refused."""
    with anonymous(target) as connection:
        errors = []
        for _ in range(100):
            chunks = (gradient(1, chunk, bytes(1 << 15)) for chunk in range(64))
            errors = target.stream(TRAIN + "Train", chunks, connection=connection)
            if [code for code, _ in errors] != ["UNAUTHENTICATED"]:
                raise AssertionError(f"a stream without a token ended with {errors}")
        return errors


def family():
    yield "half-open handshakes", half_open
    yield "handshakes byte by byte", slow_bytes
    yield "no TLS", no_tls
    yield "1,000 connections one after another", lambda target: one_after_another(target, 1000)
    yield "handshakes and nothing more", handshakes
    yield "older versions", old_versions
    yield "huge announced lengths", huge_lengths
    yield "200,000 pings, and no answer read", lambda target: frame_attacks.unread(
        target, frame_attacks.PING, 200_000, connect=encrypted)
    yield "calls without a token", refused_calls
    yield "calls with a wrong token", lambda target: refused_calls(target, "wrong")
    yield "streams without a token", streams
    yield "a gzip bomb", lambda target: size_attacks.gzip_bomb(target, JOBS + "GetJob", 30 * MEBI)
    yield "a gzip bomb without a token", gzip_without_a_token
    yield "a stream that compresses", size_attacks.gzip_stream
