"""The table of attacks, in families. Every attack is a name and a function of a Target; what it returns
are the errors that it was answered with, as (code, message)."""

import contextlib
import itertools
import queue
import random
import threading
import time

import grpc
from wire import (HYPER_PARAMETERS, JOBS, MEBI, STATE, TRAIN, RawConnection, channel, fields_of, frame, gradient,
                  group, job, message, open_train, request_headers, train, unary, varint)

CALL_SECONDS = 20
# More than a service needs that is given little of a processor; below the time after which a connection
# that answers no ping is closed.
RESETS_SECONDS = 30
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Target:
    """The service under attack, and what one attack needs of it."""

    def __init__(self, address):
        self.address = address
        self.connection = channel(address)
        self.numbers = itertools.count()

    def name(self):
        return f"hostile-{next(self.numbers)}"

    def ask(self, method, request, seconds=CALL_SECONDS, connection=None, **options):
        """(None, the answer) or ((code, message), None)."""
        try:
            return None, unary(connection or self.connection, method, request, seconds, **options)
        except grpc.RpcError as error:
            return (error.code().name, error.details()), None

    def errors(self, method, request, **options):
        error, _ = self.ask(method, request, **options)
        return [error] if error else []

    def close(self, name):
        self.ask(JOBS + "CloseJob", message((1, f"jobs/{name}")))

    @contextlib.contextmanager
    def job(self, elements=512, chunk_elements=256, parameters=1, weights=True, **more):
        """A job of the attacker's own: (name, uid, generation), its weights there and its rank taken."""
        name = self.name()
        error, answer = self.ask(JOBS + "CreateJob", message(
            (1, job(name, elements, chunk_elements, parameters, **more))), seconds=60)
        if error:
            raise AssertionError(f"the attacker's own job: {error}")
        uid = fields_of(answer)[10][0].decode()
        try:
            generation = self.attach(name)
            if weights:
                self.upload(name, uid, generation, elements * parameters, chunk_elements)
            yield name, uid, generation
        finally:
            self.close(name)

    def attach(self, name, process="evil"):
        error, answer = self.ask(JOBS + "AttachWorker", message((1, f"jobs/{name}"), (3, process)))
        if error:
            raise AssertionError(f"attaching to {name}: {error}")
        return fields_of(answer)[3][0]

    def upload(self, name, uid, generation, elements, chunk_elements):
        def requests():
            yield message((1, open_train(name, uid, "evil", generation)))
            for chunk, begin in enumerate(range(0, elements, chunk_elements)):
                size = min(chunk_elements, elements - begin)
                yield message((2, message((1, message((2, chunk))), (2, bytes(4 * size)))))
        self.connection.stream_unary(TRAIN + "UploadWeights")(requests(), timeout=60)

    def stream(self, method, requests, seconds=CALL_SECONDS, connection=None):
        """Sends the messages and reads to the end."""
        call = (connection or self.connection).stream_stream(method)(iter(requests), timeout=seconds)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return [(error.code().name, error.details())]
        return []

    def open_stream(self, name, uid, generation, connection=None, seconds=None):
        """(call, queue of requests); None in the queue closes the worker's side."""
        sent = queue.SimpleQueue()
        call = (connection or self.connection).stream_stream(TRAIN + "Train")(iter(sent.get, None), timeout=seconds)
        sent.put(message((1, open_train(name, uid, "evil", generation))))
        return call, sent


# ---------------------------------------------------------------- bytes that are no message

METHODS = [JOBS + name for name in ("CreateJob", "GetJob", "ListJobs", "CloseJob", "AttachWorker", "AbortStep",
                                    "UndoStep", "UpdateGroup", "TraceJob")] \
    + [STATE + name for name in ("ReadState", "SummarizeState", "SaveJob", "LoadJob",
                               "ListCheckpoints", "VerifyCheckpoints")] \
    + [TRAIN + "ReadWeights"]
STREAMED = {JOBS + "TraceJob", STATE + "ReadState", TRAIN + "ReadWeights"}

MALFORMED = {
    "nothing": b"",
    "a cut varint": b"\x80",
    "a varint without an end": b"\xff" * 20,
    "field number 0": b"\x00\x01",
    "an unknown wire type": b"\x0f\x01",
    "a length past the end": b"\x0a\x7fab",
    "a length of 4 GiB": b"\x0a" + varint((1 << 32) - 1) + b"a",
    "a length below 0": b"\x0a" + varint(-1),
    "another type for the name": b"\x08\x07",
    "a group that does not end": b"\x0b" * 40,
    "a group that did not begin": b"\x0c",
    "10,000 groups in each other": b"\x0b" * 10000 + b"\x0c" * 10000,
    "a name of no UTF-8": message((1, b"jobs/\xff\xfe")),
    "a name with a NUL": message((1, b"jobs/a\x00b")),
    "a name with a line's end": message((1, b"jobs/a\nb\x1b[31m")),
    "a name of 1 MiB": message((1, "jobs/" + "n" * MEBI)),
    "a name that leads out": message((1, "jobs/../../etc")),
    "another collection": message((1, "users/root")),
    "no such job": message((1, "jobs/nobody"), (2, "/tmp"), (3, 1)),
    "a MiB of unknown fields": message(*[(1000 + i % 7, i) for i in range(200000)]),
    "random bytes": random.Random(7).randbytes(4096),
    "random bytes, and more": random.Random(8).randbytes(65536),
}


def malformed(target, method, request):
    if method in STREAMED:
        call = target.connection.unary_stream(method)(request, timeout=CALL_SECONDS)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return [(error.code().name, error.details())]
        return []
    return target.errors(method, request)


def malformed_family():
    for method in METHODS:
        for what, request in MALFORMED.items():
            yield f"{method.rsplit('/')[-1]}: {what}", \
                lambda target, method=method, request=request: malformed(target, method, request)


# ---------------------------------------------------------------- messages at the wrong moment

MOMENTS = ("before open", "after open", "after begin", "after a micro-step", "after a refused seal",
           "after a discard", "after the norm", "after the commit")
WRONG = {
    "no message": b"",
    "no kind": message((99, 1)),
    "random bytes": random.Random(9).randbytes(300),
    "a cut message": b"\x1a\x7f\x0a",
    "open again": None,  # Made of the job.
    "a begin of step 7": train("begin", (1, 7)),
    "a begin with a NaN scale": train("begin", (1, 1), (2, float("nan"))),
    "a begin with 9 divisors": message((2, message((1, 1), (3, b"\x00" * 72)))),
    "a begin with a large trainer_state": train("begin", (1, 1), (5, b"x" * 5000)),
    "a begin with overrides of no group": message(
        (2, message((1, 1), (4, message((1, 77), (2, HYPER_PARAMETERS)))))),
    "a gradient of no chunk": gradient(1, 4_000_000_000, b"ab"),
    "a gradient too short": gradient(1, 0, b"ab"),
    "a gradient of 2 MiB": gradient(1, 0, b"a" * 2 * MEBI),
    "a gradient of micro-step 9": gradient(1, 0, b"\x00" * 512, 9, 10),
    "a gradient that ends before it begins": gradient(1, 0, b"\x00" * 512, 3, 1),
    "an empty gradient with bytes": gradient(1, 0, b"\x00" * 512, empty=True),
    "shared gradients of none": train("shared", (1, 1)),
    "shared gradients of nobody": train("shared", (1, 1), (3, 1), (5, 0)),
    "shared gradients of a million": message((6, message((1, 1), (3, 1), (5, b"\x00" * 1_000_000)))),
    "an end of micro-step 65,536": train("end", (1, 1), (2, 65536), (3, 1)),
    "an end that uses no parameter of the job": train("end", (1, 1), (4, 77)),
    "an end that uses a million": message((4, message((1, 1), (4, b"\x00" * 1_000_000)))),
    "an end with a finite NaN": message((4, message((1, 1), (3, 1), (5, message((3, 1)))))),
    "a seal of nothing": train("seal", (1, 1)),
    "a seal of step 3": train("seal", (1, 3), (2, 1)),
    "a seal of 4 billion micro-steps": train("seal", (1, 1), (2, 4_000_000_000)),
    "a seal with a NaN vote": train("seal", (1, 1), (2, 1), (4, message((2, message((1, float("nan"))))))),
    "a seal with a million multipliers": train("seal", (1, 1), (2, 1), (4, message((2, message((2, b"\x01" * 8 * MEBI)))))),
    "a vote": train("vote", (1, 1), (3, b"")),
    "a vote without a vote": train("vote", (1, 1)),
    "a vote on step 3": train("vote", (1, 3), (3, b"")),
    "a vote in attempt 9": train("vote", (1, 1), (2, 9), (3, b"")),
    "a vote for a norm below zero": train("vote", (1, 1), (3, message((2, message((1, -1.0)))))),
    "a vote for multipliers of nobody": train("vote", (1, 1), (3, message((2, message((2, b"\x00" * 800)))))),
    "a vote for a group that there is not": train("vote", (1, 1), (3, message((3, message((1, 77), (2, b"")))))),
    "a vote with a large trainer_state": train("vote", (1, 1), (3, message((4, b"x" * 5000)))),
    "a begin that expects a NaN": train("begin", (1, 1), (7, message((1, float("nan"))))),
    "a discard of nothing": train("discard"),
    "a discard of step 3": train("discard", (1, 3)),
    "a discard of attempt 9": train("discard", (1, 1), (2, 9)),
    "a discard of the last attempt there is": train("discard", (1, 1), (2, 4_294_967_295)),
    "a begin of attempt 9": train("begin", (1, 1), (6, 9)),
    "an end in attempt 9": train("end", (1, 1), (3, 1), (6, 9)),
    "a seal of attempt 9": train("seal", (1, 1), (2, 1), (3, 9)),
    "a gradient of attempt 9": train("gradient", (1, message((1, 1), (4, 1), (7, 9))), (2, b"\x00" * 512)),
    "a message of 8 MiB": message((99, b"a" * 8 * MEBI)),
}


def wrong_moment(target, moment, what):
    with target.job() as (name, uid, generation):
        opening = message((1, open_train(name, uid, "evil", generation)))
        wrong = opening if what == "open again" else WRONG[what]
        before = {"before open": [], "after open": [opening]}.get(moment)
        if before is None:
            before = [opening, train("begin", (1, 1))]
            if moment in ("after a micro-step", "after a refused seal"):
                before += [gradient(1, 0, b"\x00" * 512), train("end", (1, 1), (3, 1))]
            if moment == "after a discard":
                before += [gradient(1, 0, b"\x00" * 512), train("discard", (1, 1))]
            if moment == "after a refused seal":
                before += [train("seal", (1, 1), (2, 1))]
            if moment in ("after the norm", "after the commit"):
                before += [gradient(1, chunk, b"\x00" * 512) for chunk in (0, 1)]
                before += [train("end", (1, 1), (3, 1)), train("seal", (1, 1), (2, 1))]
            if moment == "after the commit":
                before[-1] = train("seal", (1, 1), (2, 1), (4, b""))
        return target.stream(TRAIN + "Train", before + [wrong])


def moments_family():
    for moment in MOMENTS:
        for what in WRONG:
            yield f"{what}, {moment}", lambda target, moment=moment, what=what: wrong_moment(target, moment, what)


# ---------------------------------------------------------------- descriptions


def create(target, description, **options):
    return target.errors(JOBS + "CreateJob", message((1, description)), seconds=60, **options)


def described(*fields):
    return lambda target: create(target, message((1, f"jobs/{target.name()}"), *fields))


def at_once(count, action):
    """What `count` threads return that do the same."""
    results = []
    threads = [threading.Thread(target=lambda: results.extend(action())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


MILLION_AND_A_HALF = b"\x22\x00" * 1_500_000
MILLION = b"\x22\x00" * 1_000_000


def raw_job(target, fields):
    return create(target, message((1, f"jobs/{target.name()}")) + fields)


def many_large_names(target):
    """Jobs whose descriptions fill more than a message, and a list of them."""
    names = [target.name() for _ in range(40)]
    groups = [(3, group(f"{i:04d}" + "g" * 250)) for i in range(3500)]
    errors = []
    for name in names:
        errors += create(target, message((1, f"jobs/{name}"), (2, 1), *groups))
    listed, answer = target.ask(JOBS + "ListJobs", b"")
    if listed or not answer:
        raise AssertionError(f"nobody can list the jobs: {listed}")
    for name in names:
        target.close(name)
    return errors


def attach_with(fields):
    def attack(target):
        with target.job(weights=False) as (name, _, _):
            return target.errors(JOBS + "AttachWorker", message(
                (1, f"jobs/{name}"), (3, "evil"), (6, message((1, f"jobs/{name}")) + fields)))
    return attack


def descriptions_family():
    yield "1.5M empty parameters", lambda target: raw_job(target, MILLION_AND_A_HALF)
    yield "1.5M empty parameters, 16 at once", lambda target: at_once(
        16, lambda: raw_job(target, MILLION_AND_A_HALF))
    yield "a million empty parameters, 8 at once", lambda target: at_once(8, lambda: raw_job(target, MILLION))
    yield "10M empty ranges", lambda target: raw_job(target, b"\x2a\x00" * 10_000_000)
    yield "100,000 groups", lambda target: raw_job(target, b"\x1a\x00" * 100_000)
    yield "a shape of 10M dimensions", lambda target: raw_job(
        target, message((2, 1), (4, message((1, "p"), (2, b"\x01" * 10_000_000), (4, 1)))))
    yield "a parameter's name of 10 MB", lambda target: raw_job(
        target, message((2, 1), (3, group()), (4, message((1, "p" * 10_000_000), (4, 1)))))
    yield "a group's name of 10 MB", lambda target: raw_job(target, message((2, 1), (3, group("g" * 10_000_000))))
    yield "a job's name of 10 MB", lambda target: create(target, message((1, "j" * 10_000_000), (2, 1)))
    yield "a world of 2 billion", described((2, 2_000_000_000), (3, group()))
    yield "a world of -1", described((2, -1), (3, group()))
    yield "2^40 elements", lambda target: create(target, job(target.name(), 1 << 40))
    yield "2^62 elements", lambda target: create(target, job(target.name(), 1 << 62))
    yield "a job larger than the limit", lambda target: create(target, job(target.name(), 1 << 28))
    yield "chunks of one block, 2^30 of them", lambda target: create(target, job(target.name(), 1 << 38, 256))
    yield "40 jobs of 900 KB of groups' names", many_large_names
    yield "attaching with a million parameters", attach_with(MILLION)
    yield "attaching with 10M ranges", attach_with(b"\x2a\x00" * 10_000_000)
    yield "attaching with 30 MB of an unknown field", attach_with(message((99, b"x" * 30_000_000)))
    yield "a process of 10 MB", lambda target: target.errors(
        JOBS + "AttachWorker", message((1, "jobs/honest"), (3, "p" * 10_000_000)))


def many_jobs(target):
    names = [target.name() for _ in range(1200)]
    errors = []
    for name in names:
        errors += create(target, job(name, 0))
    for name in names:
        target.close(name)
    if not any(code == "RESOURCE_EXHAUSTED" for code, _ in errors):
        raise AssertionError("nobody counts the jobs")
    return errors[:3]


# ---------------------------------------------------------------- size


def large_message(target, size, method=JOBS + "GetJob"):
    request = message((99, b"x" * size))
    with contextlib.closing(channel(target.address)) as connection:
        return target.errors(method, request, connection=connection)


def unfinished_messages(target, connections, size):
    """Each says that a message of 4 GiB comes and sends a part of it."""
    block = frame(RawConnection.DATA, 0, 1, b"x" * 16000)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(RawConnection(target.address)) for _ in range(connections)]
        for one in opened:
            one.send(frame(1, 4, 1, request_headers(TRAIN + "Train")))
            one.send(frame(0, 0, 1, b"\x00\xff\xff\xff\xff"))
            one.socket.settimeout(0.5)
            with contextlib.suppress(OSError):
                for _ in range(size // 16000):
                    one.send(block)
    return []


def gzip_bomb(target, method, size, count=1):
    def send():
        with contextlib.closing(channel(target.address)) as connection:
            return target.errors(method, message((99, bytes(size))), connection=connection,
                                 compression=grpc.Compression.Gzip)
    return at_once(count, send)


def gzip_stream(target):
    with target.job() as (name, uid, generation), contextlib.closing(channel(target.address)) as connection:
        requests = [message((1, open_train(name, uid, "evil", generation))), message((99, bytes(30 * MEBI)))]
        call = connection.stream_stream(TRAIN + "Train")(
            iter(requests), timeout=CALL_SECONDS, compression=grpc.Compression.Gzip)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return [(error.code().name, error.details())]
        raise AssertionError("a compressed stream was taken")


def size_family():
    for mebi in (8, 31, 33, 64, 120):
        yield f"a message of {mebi} MiB", lambda target, mebi=mebi: large_message(target, mebi * MEBI)
    yield "a message of 64 MiB to create a job", lambda target: large_message(target, 64 * MEBI, JOBS + "CreateJob")
    for connections in (1, 8):
        yield f"a message of 4 GiB that goes on, {connections} of them", \
            lambda target, connections=connections: unfinished_messages(target, connections, 100 * MEBI // connections)
    for mebi in (1, 30, 60):
        yield f"a gzip of {mebi} MiB of zeros", \
            lambda target, mebi=mebi: gzip_bomb(target, JOBS + "GetJob", mebi * MEBI)
    yield "a gzip bomb to create a job", lambda target: gzip_bomb(target, JOBS + "CreateJob", 30 * MEBI)
    yield "8 gzip bombs at once", lambda target: gzip_bomb(target, JOBS + "GetJob", 10 * MEBI, 8)
    yield "a stream that compresses", gzip_stream


# ---------------------------------------------------------------- streams that take and do not give


def micro_steps_without_end(target):
    """Ends of micro-steps, each with a set of parameters of its own."""
    with target.job(elements=1, parameters=65536, chunk_elements=65536) as (name, uid, generation):
        def requests():
            yield message((1, open_train(name, uid, "evil", generation)))
            yield train("begin", (1, 1))
            for micro_step in range(2000):
                yield train("end", (1, 1), (2, micro_step), (4, micro_step % 65521))
        return target.stream(TRAIN + "Train", requests(), seconds=60)


def seals_without_reading(target):
    """A seal that is refused with the names of all parameters, again and again, and nobody reads."""
    with target.job(elements=256, chunk_elements=256, parameters=2000) as (name, uid, generation):
        with contextlib.closing(channel(target.address, ("grpc.http2.lookahead_bytes", 0))) as connection:
            call, sent = target.open_stream(name, uid, generation, connection, seconds=2)
            sent.put(train("begin", (1, 1)))
            sent.put(train("end", (1, 1), (3, 1)))
            for _ in range(3000):
                sent.put(train("seal", (1, 1), (2, 1)))
            sent.put(None)
            with contextlib.suppress(grpc.RpcError):
                call.result(2)
            call.cancel()
    return []


def discards_without_reading(target):
    """One attempt after the other is begun and discarded, and nobody reads."""
    with target.job() as (name, uid, generation):
        with contextlib.closing(channel(target.address, ("grpc.http2.lookahead_bytes", 0))) as connection:
            call, sent = target.open_stream(name, uid, generation, connection, seconds=2)
            for attempt in range(3000):
                sent.put(train("begin", (1, 1), (6, attempt)))
                sent.put(train("discard", (1, 1), (2, attempt)))
            sent.put(None)
            with contextlib.suppress(grpc.RpcError):
                call.result(2)
            call.cancel()
    return []


def chunks_again(target):
    with target.job(elements=MEBI, chunk_elements=262144) as (name, uid, _):
        call = target.connection.unary_stream(TRAIN + "ReadWeights")(
            message((1, f"jobs/{name}"), (2, uid), (4, bytes(1_000_000))), timeout=CALL_SECONDS)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            return [(error.code().name, error.details())]
    raise AssertionError("a chunk was sent a million times")


def readers_that_do_not_read(target):
    """They take all places for readers; another process still takes its rank."""
    with target.job(elements=MEBI, chunk_elements=262144) as (name, uid, generation):
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(contextlib.closing(channel(target.address))) for _ in range(4)]
            calls = [one.unary_stream(STATE + "ReadState")(message((1, f"jobs/{name}/parameters/p0"), (2, 1)))
                     for one in connections for _ in range(75)]
            stack.callback(lambda: [call.cancel() for call in calls])
            for _ in range(20):
                target.attach(name)
            if target.errors(JOBS + "GetJob", message((1, f"jobs/{name}"))):
                raise AssertionError("no job can be described while readers do not read")
            errors = []
            for call in calls[-3:]:
                with contextlib.suppress(grpc.RpcError):
                    next(iter(call))
                if call.done():
                    errors.append((call.code().name, call.details()))
            return errors


def closed_under_readers(target):
    """A job of 200 MB is closed while readers and a stream of it do not read."""
    name = target.name()
    for error in create(target, job(name, 12 * MEBI, 262144)):
        raise AssertionError(f"the job to close: {error}")
    uid = fields_of(target.ask(JOBS + "GetJob", message((1, f"jobs/{name}")))[1])[10][0].decode()
    generation = target.attach(name)
    target.upload(name, uid, generation, 12 * MEBI, 262144)
    # They stay open: the memory must come back while they are.
    kept = [channel(target.address) for _ in range(3)]
    target.kept += kept
    for method, request in ((STATE + "ReadState", message((1, f"jobs/{name}/parameters/p0"), (2, 1))),
                            (TRAIN + "ReadWeights", message((1, f"jobs/{name}"), (2, uid)))):
        target.kept.append(kept[0].unary_stream(method)(request))
    call, sent = target.open_stream(name, uid, generation, kept[1])
    target.kept += [call, sent]
    upload = kept[2].stream_unary(TRAIN + "UploadWeights").future(
        iter(queue.SimpleQueue().get, None))
    target.kept.append(upload)
    sent.put(train("begin", (1, 1)))
    target.close(name)
    return []


def taking_family():
    yield "2,000 micro-steps, each of which uses another parameter", micro_steps_without_end
    yield "3,000 refused seals and no reader", seals_without_reading
    yield "3,000 discards and no reader", discards_without_reading
    yield "one chunk a million times", chunks_again
    yield "300 readers that do not read", readers_that_do_not_read
    yield "a job closed under readers that do not read", closed_under_readers
    yield "1,200 jobs", many_jobs


# ---------------------------------------------------------------- connections


def resets(target, method, count):
    """Streams that are opened and reset at once: the service closes the connection."""
    headers = request_headers(method)
    end = time.monotonic() + RESETS_SECONDS
    with RawConnection(target.address) as raw:
        raw.socket.settimeout(RESETS_SECONDS)
        with contextlib.suppress(ConnectionError):
            for first in range(1, 2 * count, 200):
                raw.send(b"".join(frame(1, 5, stream, headers) + frame(3, 0, stream, b"\x00\x00\x00\x08")
                                  for stream in range(first, first + 200, 2)))
            while raw.socket.recv(1 << 16):
                if time.monotonic() > end:
                    raise AssertionError("the connection is still there")
    return []


def honest_reconnecting(target, connections):
    """A client that connects again and again, calls, and gives up what it has open; none is closed."""
    for _ in range(connections):
        with contextlib.closing(channel(target.address)) as connection:
            given_up = [connection.unary_unary(JOBS + "ListJobs").future(b"", timeout=CALL_SECONDS)
                        for _ in range(20)]
            for call in given_up:
                call.cancel()
            if errors := target.errors(JOBS + "ListJobs", b"", connection=connection):
                raise AssertionError(f"an honest client is refused: {errors}")
    return []


def honest_cancels(target, rounds, calls):
    """As many calls as a connection may have, all given up, and then another."""
    with contextlib.closing(channel(target.address)) as connection:
        for _ in range(rounds):
            given_up = [connection.unary_unary(JOBS + "ListJobs").future(b"", timeout=CALL_SECONDS)
                        for _ in range(calls)]
            for call in given_up:
                call.cancel()
            if errors := target.errors(JOBS + "ListJobs", b"", connection=connection):
                raise AssertionError(f"an honest client is refused: {errors}")
    return []


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


def raw_frames(target, data):
    with RawConnection(target.address) as raw:
        raw.socket.settimeout(0.2)
        with contextlib.suppress(OSError):
            raw.send(data)
            while raw.socket.recv(1 << 16):
                pass
    return []


def reflection_streams(target, count):
    """Streams of the reflection service, each of which has a thread: those that get none are told so."""
    calls = []
    try:
        for _ in range(count):
            calls.append(target.connection.stream_stream(REFLECTION)(iter(queue.SimpleQueue().get, None)))
        end = time.monotonic() + CALL_SECONDS
        while not any(call.done() for call in calls) and time.monotonic() < end:
            time.sleep(0.01)
        errors = [(call.code().name, call.details()) for call in calls if call.done()]
        if not errors:
            raise AssertionError(f"{count} streams of reflection have a thread each")
        return errors[:3] + target.errors(JOBS + "ListJobs", b"")
    finally:
        for call in calls:
            call.cancel()


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
    "10,000 settings": frame(4, 0, 0, b"\x00\x04\x00\x00\xff\xff") * 10000,
    "10,000 pings": frame(6, 0, 0, b"12345678") * 10000,
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
    for method in (JOBS + "GetJob", TRAIN + "Train", TRAIN + "UploadWeights", STATE + "ReadState", "/no/method",
                   "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"):
        yield f"5,000 resets of {method}", lambda target, method=method: resets(target, method, 5000)
    yield "an honest client that reconnects 100 times", lambda target: honest_reconnecting(target, 100)
    yield "an honest client that gives up 900 calls", lambda target: honest_cancels(target, 3, 300)
    yield "300 connections 10 times", lambda target: connections_again(target, 300, 10)
    yield "500 silent connections", lambda target: idle_connections(target, 500, b"")
    yield "500 connections of HTTP/1", lambda target: idle_connections(target, 500, b"GET / HTTP/1.1\r\n\r\n")
    yield "200 connections of TLS", lambda target: idle_connections(target, 200, b"\x16\x03\x01\x02\x00\x01")
    for method in (TRAIN + "Train", TRAIN + "UploadWeights"):
        yield f"3,000 silent streams of {method}", lambda target, method=method: many_streams(target, 3000, method)
    yield "40 streams of reflection", lambda target: reflection_streams(target, 40)


FAMILIES = {
    "malformed": malformed_family,
    "moments": moments_family,
    "descriptions": descriptions_family,
    "size": size_family,
    "taking": taking_family,
    "connections": connections_family,
}
