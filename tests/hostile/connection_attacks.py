"""Attacks on the connections themselves, and by their number: the families "connections" and "silence"."""

import contextlib
import queue
import time

import grpc
from attacks import CALL_SECONDS, REFLECTION
from wire import (JOBS, STATE, TRAIN, RawConnection, channel, fields_of, frame, message, request, request_headers)

def resets(target, method, count):
    """Streams that are opened and reset at once. gRPC works all of them off, and then still answers."""
    headers = request_headers(method)
    with RawConnection(target.address) as raw:
        for first in range(1, 2 * count, 200):
            raw.send(b"".join(frame(1, 5, stream, headers) + frame(3, 0, stream, b"\x00\x00\x00\x08")
                              for stream in range(first, first + 200, 2)))
        return target.errors(JOBS + "ListJobs", b"")


def connections_again(target, count, rounds):
    for _ in range(rounds):
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(RawConnection(target.address))
    return []


def idle_connections(target, count, data):
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(RawConnection(target.address, preface=False))
            one.send(data)
        return target.errors(JOBS + "ListJobs", b"")


def many_streams(target, count, method):
    """Opened on one connection, and nothing said on them."""
    headers = request_headers(method)
    with RawConnection(target.address) as raw:
        with contextlib.suppress(OSError):
            for stream in range(1, 2 * count, 2):
                raw.send(frame(1, 4, stream, headers))
        return target.errors(JOBS + "ListJobs", b"")


def streams_without_end(target):
    """Of a client that acknowledges no settings, so that nothing bounds them. Ends with the connection."""
    headers = request_headers(JOBS + "GetJob")
    with contextlib.suppress(ConnectionError), RawConnection(target.address) as raw:
        for first in range(1, 400_000, 2000):
            raw.send(b"".join(frame(1, 4, stream, headers) for stream in range(first, first + 2000, 2)))


def raw_frames(target, data):
    with RawConnection(target.address) as raw:
        with contextlib.suppress(OSError):
            raw.send(data)
        return raw.errors(seconds=0.2)


def stream_limit(target):
    """What the service says of how many streams a connection may have, and does with a client that has more."""
    most = 1024
    with RawConnection(target.address, source="127.0.1.1") as raw:
        said = raw.await_service().get(3)
        raw.send(b"".join(frame(1, 4, stream, request_headers(TRAIN + "Train")) for stream in range(1, 2 * most + 21, 2)))
        answered = {stream for kind, _, stream, _ in raw.frames(seconds=30) if kind == raw.HEADERS}
        if said != most or len(answered) > most or raw.is_open():
            raise AssertionError(f"it says {said} streams; {len(answered)} were answered, and the connection goes on")
    return []


def reflection_streams(target, count):
    """Those beyond what there is room for get a line that says so."""
    with RawConnection(target.address, source="127.0.1.2") as raw:
        raw.await_service()
        raw.send(b"".join(frame(1, 4, stream, request_headers(REFLECTION)) for stream in range(1, 2 * count, 2)))
        errors = []
        end = time.monotonic() + CALL_SECONDS
        while not errors and time.monotonic() < end:
            errors = raw.errors(seconds=1)
    if not errors:
        raise AssertionError(f"{count} streams of reflection have a place")
    return errors[:3] + target.errors(JOBS + "ListJobs", b"")


def taken_places(target):
    """As many silent streams as there are places for ranks, and more; then one that has a rank opens."""
    with target.job() as (name, uid, generation), contextlib.ExitStack() as stack:
        for host in range(9):
            raw = stack.enter_context(RawConnection(target.address, source=f"127.0.2.{host + 1}"))
            raw.await_service()
            raw.send(b"".join(frame(1, 4, stream, request_headers(TRAIN + method)) for stream, method in zip(
                range(1, 2000, 2), 500 * ("Train", "UploadWeights"))))
            raw.send(request(JOBS + "ListJobs", 2001))
            if not any(stream == 2001 for _, _, stream, _ in raw.frames(seconds=30) if stream):
                raise AssertionError("the connection is not answered")
        call, sent = target.open_stream(name, uid, generation, seconds=CALL_SECONDS)
        try:
            if 1 not in fields_of(next(call)):
                raise AssertionError("the stream was not opened")
        except grpc.RpcError as error:
            raise AssertionError(f"a rank is kept out: {error.details()}") from error
        finally:
            sent.put(None)
            call.cancel()
    return []


def unread_answers(target):
    """A connection whose window is closed asks as often as there are places, and takes no answer."""
    with RawConnection(target.address, source="127.0.1.3", settings=b"\x00\x04\x00\x00\x00\x00") as raw:
        raw.await_service()
        raw.send(b"".join(request(JOBS + "ListJobs", stream) for stream in range(1, 2048, 2)))
        answered = set()
        for _, _, stream, _ in raw.frames(seconds=30):
            answered |= {stream} - {0}
            if len(answered) == 1024:  # Their headers, to which the window does not apply.
                break
        else:
            raise AssertionError(f"{len(answered)} answers were begun")
        with target.job() as (name, _, _):
            target.attach(name)
    return []


FRAMES = {
    "a window update of 0": frame(8, 0, 0, b"\x00" * 4),
    "a window that overflows": frame(8, 0, 0, b"\x7f\xff\xff\xff") * 3,
    "data on no stream": frame(0, 0, 1, b"x" * 100),
    "data on stream 0": frame(0, 0, 0, b"x" * 100),
    "headers on stream 0": frame(1, 4, 0, request_headers(JOBS + "GetJob")),
    "headers on an even stream": frame(1, 4, 2, request_headers(JOBS + "GetJob")),
    "headers that are no HPACK": frame(1, 4, 1, b"\xff" * 200),
    "headers of 16 MB in continuations": frame(1, 0, 1, b"\x00\x01a\x7f\xff\xff\x07" + b"v" * 16000)
    + frame(9, 0, 1, b"v" * 16000) * 1000,
    "continuations without an end": frame(1, 0, 1, request_headers(JOBS + "GetJob")) + frame(9, 0, 1) * 20000,
    "10,000 priorities": frame(2, 0, 1, b"\x00\x00\x00\x00\x10") * 10000,
    "a settings frame of 7 bytes": frame(4, 0, 0, b"1234567"),
    "an unknown frame": frame(200, 255, 1, b"x" * 1000),
    "a frame of 16 MB": b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 100000,
    "a push promise": frame(5, 4, 1, b"\x00\x00\x00\x02"),
    "goaway and on": frame(7, 0, 0, b"\x00" * 8) + frame(1, 5, 1, request_headers(JOBS + "GetJob")),
    "no such method": frame(1, 5, 1, request_headers("/ballast.v1.JobService/Nothing")),
    "a path of 16 KB": frame(1, 0, 1, b"\x00\x05:path\x7f\x81\x7f" + b"/" * 16000),
    "a message cut by its end":
        frame(1, 4, 1, request_headers(JOBS + "GetJob")) + frame(0, 1, 1, b"\x00\x00\x00\x09ab"),
    "a message with unknown flags":
        frame(1, 4, 1, request_headers(JOBS + "GetJob")) + frame(0, 1, 1, b"\xfe\x00\x00\x00\x00"),
    "a compressed message that says nothing of it":
        frame(1, 4, 1, request_headers(JOBS + "GetJob")) + frame(0, 1, 1, b"\x01\x00\x00\x00\x02ab"),
}


def connections_family():
    for what, data in FRAMES.items():
        yield what, lambda target, data=data: raw_frames(target, data)
    for method in (JOBS + "GetJob", TRAIN + "Train", "/no/method", "/grpc.health.v1.Health/Watch"):
        yield f"5,000 resets of {method}", lambda target, method=method: resets(target, method, 5000)
    yield "300 connections 10 times", lambda target: connections_again(target, 300, 10)
    yield "500 silent connections", lambda target: idle_connections(target, 500, b"")
    yield "500 connections of HTTP/1", lambda target: idle_connections(target, 500, b"GET / HTTP/1.1\r\n\r\n")
    yield "200 connections of TLS", lambda target: idle_connections(target, 200, b"\x16\x03\x01\x02\x00\x01")
    for method in (TRAIN + "Train", TRAIN + "UploadWeights"):
        yield f"3,000 silent streams of {method}", lambda target, method=method: many_streams(target, 3000, method)
    yield "9,000 silent streams, and one that has a rank", taken_places
    yield "1,034 streams of a connection", stream_limit
    yield "1,024 answers that nobody takes", unread_answers
    yield "300 streams of reflection", lambda target: reflection_streams(target, 300)


# ---------------------------------------------------------------- silence


class Silence:
    """Peers that begin something with the suite and then say nothing. The service has ended each when it is asked for,
    within the time that it says and some more."""

    PATIENCE = 60

    def __init__(self, target):
        self.target = target
        self.began = time.monotonic()
        self.connection = channel(target.address)
        silent = iter(queue.SimpleQueue().get, None)
        self.begin = {"Train": lambda: self.connection.stream_stream(TRAIN + "Train")(silent),
                      "UploadWeights": lambda: self.connection.stream_unary(TRAIN + "UploadWeights").future(silent)}
        self.streams = {what: begin() for what, begin in self.begin.items()}
        # A call that waits, of a peer that answers no ping.
        self.stack = contextlib.ExitStack()
        name, _, _ = self.stack.enter_context(target.job())
        self.raw = RawConnection(target.address)
        self.raw.send(request(JOBS + "TraceJob", 1, message((1, f"jobs/{name}"), (2, 1))))

    def stop(self):
        self.stack.close()
        self.raw.close()
        self.connection.close()

    def left(self):
        return max(self.began + self.PATIENCE - time.monotonic(), 0.1)

    def ended(self, what):
        call, end, last = self.streams[what], time.monotonic() + self.left(), time.monotonic() + 2 * self.PATIENCE
        while time.monotonic() < end:
            if call.done() and call.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
            if call.done():
                # Other attacks have filled what may be buffered, and gRPC has ended this one first (server/README.md);
                # or they have its place still.
                call, end = self.begin[what](), min(last, time.monotonic() + self.PATIENCE)
            time.sleep(0.05)
        if not call.done():
            raise AssertionError("it goes on")
        if call.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise AssertionError(f"it ended with {call.code().name}: {call.details()}")
        return [(call.code().name, call.details())]

    def closed(self):
        self.raw.socket.settimeout(self.left())
        with contextlib.suppress(ConnectionError):
            try:
                while self.raw.socket.recv(1 << 16):
                    pass
            except TimeoutError:
                raise AssertionError("the connection is still there") from None
        return []

    def family(self):
        for what in self.streams:
            yield f"a {what} stream that says nothing", lambda _, what=what: self.ended(what)
        yield "a peer that answers no ping", lambda _: self.closed()


