"""Attacks in families. Every attack is a name and a function of a Target; what it returns are the errors that it
was answered with, as (code, message). Here: messages that are none, at the wrong moment, or with values without an end,
and streams that take and do not give."""

import concurrent.futures
import contextlib
import itertools
import queue
import random
import struct

import grpc
from wire import (DIAGNOSTICS, HYPER_PARAMETERS, JOBS, MEBI, STATE, TRAIN, channel, fields_of, gradient, job, message,
                  open_train, train, unary, varint)

CALL_SECONDS = 20
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

    def read_all(self, method, request, seconds=CALL_SECONDS, connection=None):
        """The errors of a call with a stream of answers, which are read to the end."""
        try:
            for _ in (connection or self.connection).unary_stream(method)(request, timeout=seconds):
                pass
        except grpc.RpcError as error:
            return [(error.code().name, error.details())]
        return []

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


def create(target, description, **options):
    return target.errors(JOBS + "CreateJob", message((1, description)), seconds=60, **options)


def at_once(count, action):
    """What `count` threads return that do the same."""
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return [each for done in [threads.submit(action) for _ in range(count)] for each in done.result()]


def error_of(call, requests):
    try:
        call(iter(requests), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        return error
    return None


# ---------------------------------------------------------------- bytes that are no message

METHODS = [JOBS + name for name in ("CreateJob", "GetJob", "ListJobs", "CloseJob", "AttachWorker", "AbortStep", "GetHistory",
                                    "UndoStep", "UpdateGroup", "TraceJob")] \
    + [STATE + name for name in ("ReadState", "SummarizeState", "SaveJob", "LoadJob",
                               "ListCheckpoints", "VerifyCheckpoints", "DeleteCheckpoint")] \
    + [TRAIN + "ReadWeights", DIAGNOSTICS + "DescribeService"]
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


def malformed(target, method, request, connection=None):
    if method in STREAMED:
        return target.read_all(method, request, connection=connection)
    return target.errors(method, request, connection=connection)


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


# ---------------------------------------------------------------- numbers

NAN, INFINITY, LARGE_BF16 = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x61\x7f"  # The last is 2.99e38.


def spoiled_first_weights(value):
    def attack(target):
        with target.job(weights=False) as (name, uid, generation):
            chunk = bytes(400) + value + bytes(620)
            error = error_of(target.connection.stream_unary(TRAIN + "UploadWeights"), [
                message((1, open_train(name, uid, "evil", generation))),
                message((2, message((1, message((2, 0))), (2, chunk))))])
            if error is None:
                raise AssertionError("the job has taken them")
            return [(error.code().name, error.details())]
    return attack


def step_of(target, name, uid, generation, gradients, *settings):
    """(decision, its fields) of step 1 with these two chunks' gradients, voted for as they are."""
    call, sent = target.open_stream(name, uid, generation, seconds=CALL_SECONDS)
    try:
        for request in (train("begin", (1, 1), *settings), gradient(1, 0, gradients), gradient(1, 1, gradients),
                        train("end", (1, 1), (3, 1)), train("seal", (1, 1), (2, 1), (4, b""))):
            sent.put(request)
        for answer in call:
            kinds = fields_of(answer)
            if 5 in kinds:
                return fields_of(kinds[5][0])
        raise AssertionError("no decision came")
    finally:
        sent.put(None)
        call.cancel()


def values_without_an_end(gradients, *settings):
    """A step that would leave what is not finite in the state: it is skipped, and says why."""
    def attack(target):
        with target.job() as (name, uid, generation):
            decision = step_of(target, name, uid, generation, gradients * 256, *settings)
            if decision.get(2, [0])[0]:
                raise AssertionError("the step was applied")
            for plane in (1, 2, 3):
                for part in target.connection.unary_stream(STATE + "ReadState")(
                        message((1, f"jobs/{name}/parameters/p0"), (2, plane)), timeout=CALL_SECONDS):
                    data = fields_of(part).get(5, [b""])[0]
                    if any(data):
                        raise AssertionError(f"plane {plane} has moved")
            return [("SKIPPED", decision[5][0].decode())]
    return attack


def numbers_family():
    yield "first weights with a NaN", spoiled_first_weights(NAN)
    yield "first weights with an infinity", spoiled_first_weights(INFINITY)
    yield "a gradient of NaN", values_without_an_end(b"\xc0\x7f")
    yield "a gradient of infinity", values_without_an_end(b"\x80\x7f")
    yield "finite gradients that overflow", values_without_an_end(LARGE_BF16, (3, struct.pack("<d", 0.5)))
    yield "finite gradients whose squares overflow", values_without_an_end(LARGE_BF16)


# ---------------------------------------------------------------- streams that take and do not give


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
                call.result(CALL_SECONDS)
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
                call.result(CALL_SECONDS)
            call.cancel()
    return []


def chunks_again(target):
    with target.job(elements=MEBI, chunk_elements=262144) as (name, uid, _):
        if errors := target.read_all(TRAIN + "ReadWeights", message((1, f"jobs/{name}"), (2, uid), (5, bytes(60_000)))):
            return errors
    raise AssertionError("a chunk was sent 60,000 times")


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
    yield "one chunk 60,000 times", chunks_again
    yield "300 readers that do not read", readers_that_do_not_read
    yield "a job closed under readers that do not read", closed_under_readers
    yield "1,200 jobs", many_jobs


FAMILIES = {
    "malformed": malformed_family,
    "moments": moments_family,
    "numbers": numbers_family,
    "taking": taking_family,
}
