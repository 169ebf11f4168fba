"""Attacks by the size of messages, and of what they say: the families "descriptions", "fields" and "size"."""

import contextlib

import grpc
from attacks import (CALL_SECONDS, METHODS, REFLECTION, STATE, at_once, create, error_of, malformed)
from wire import (DIAGNOSTICS, JOBS, MEBI, TRAIN, RawConnection, channel, frame, group, job, message, open_train,
                  request_headers)


# ---------------------------------------------------------------- descriptions


def described(*fields):
    return lambda target: create(target, message((1, f"jobs/{target.name()}"), *fields))


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


def job_of_unknown_fields(target):
    """There is room for them, so that it is created as if a newer client had described it."""
    name = target.name()
    if errors := create(target, job(name, 0) + b"\x7a\x00" * 3_000_000):
        raise AssertionError(f"it was refused: {errors}")
    target.close(name)
    return []


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
    yield "a job's name of 1 MiB, which each of 10,000 parameters repeats", lambda target: create(target, message(
        (1, "j" * MEBI), (2, 1), (3, group()), *((4, message((1, f"p{i}"), (4, 1))) for i in range(10_000))))
    yield "a world of 2 billion", described((2, 2_000_000_000), (3, group()))
    yield "a world of -1", described((2, -1), (3, group()))
    yield "2^40 elements", lambda target: create(target, job(target.name(), 1 << 40))
    yield "2^62 elements", lambda target: create(target, job(target.name(), 1 << 62))
    yield "a job larger than the limit", lambda target: create(target, job(target.name(), 1 << 28))
    yield "chunks of one block, 2^30 of them", lambda target: create(target, job(target.name(), 1 << 38, 256))
    yield "40 jobs of 900 KB of groups' names", many_large_names
    yield "attaching with a million parameters", attach_with(MILLION)
    yield "attaching with 10M ranges", attach_with(b"\x2a\x00" * 10_000_000)
    for what, fields_ in (("in it", lambda: message((1, job("hostile-fields", 0) + UNKNOWN))),
                          ("of a parameter", lambda: message((1, message((1, "jobs/a"), (4, UNKNOWN[:-64]))))),
                          ("beside it", lambda: message((1, job("hostile-fields", 0))) + UNKNOWN)):
        yield f"31 MiB of unknown fields {what}", lambda target, fields_=fields_: target.errors(
            JOBS + "CreateJob", fields_())
    yield f"31 MiB of unknown fields beside it, {AT_ONCE} at once", lambda target: at_once(
        AT_ONCE, lambda: fields(target, JOBS + "CreateJob", message((1, job("hostile-fields", 0))) + UNKNOWN))
    yield "3 million unknown fields", job_of_unknown_fields
    yield "attaching with 30 MB of an unknown field", attach_with(message((99, b"x" * 30_000_000)))
    yield "a process of 10 MB", lambda target: target.errors(
        JOBS + "AttachWorker", message((1, "jobs/honest"), (3, "p" * 10_000_000)))


# ---------------------------------------------------------------- fields

# Of number 15, which no message here has, without contents: each takes some 60 bytes when it is parsed. And a group,
# overrides, shapes, chunks: what messages have, again and again.
LARGEST = 31 * MEBI
UNKNOWN = b"\x7a\x00" * (LARGEST // 2)
KNOWN = {
    "overrides of a step": (TRAIN + "Train", message((2, b"\x22\x00" * (4 * MEBI)))),
    "overrides of 100,000 groups": (TRAIN + "Train", message((2, b"".join(
        message((4, message((1, number)))) for number in range(100_000))))),
    "headers of one gradient": (TRAIN + "Train", message((3, message((1, b"\x7a\x00" * 16_000)) * 900))),
    "gradients in one message": (TRAIN + "Train", b"\x1a\x00" * (4 * MEBI)),
    "kinds that take turns": (TRAIN + "Train", b"\x1a\x00\x2a\x00" * (4 * MEBI)),
    "parameters that were used": (TRAIN + "Train", message((4, message((4, bytes(30 * MEBI)))))),
    "counts of a first state": (TRAIN + "UploadWeights", message((1, message((8, message((2, bytes(30 * MEBI)))))))),
    "headers of first weights": (TRAIN + "UploadWeights", message((2, message((1, b"\x7a\x00" * 16_000)) * 900))),
    "chunks to read": (TRAIN + "ReadWeights", message((4, bytes(30 * MEBI)))),
}
AT_ONCE = 16


def fields(target, method, request):
    """On a connection of its own."""
    with contextlib.closing(channel(target.address)) as connection:
        if method in (TRAIN + "Train", REFLECTION):
            return target.stream(method, [request], connection=connection)
        if method == TRAIN + "UploadWeights":
            call = connection.stream_unary(method)
            return [(error.code().name, error.details())] if (error := error_of(call, [request])) else []
        return malformed(target, method, request, connection)


def refused_fields(target, method, request, count=1):
    errors = at_once(count, lambda: fields(target, method, request))
    if len(errors) != count:
        raise AssertionError(f"{count - len(errors)} of {count} were taken")
    return errors[:3]


def unknown_fields_of(target, method):
    """In a message that is a good one besides, of no job."""
    good = {JOBS + "CreateJob": lambda: message((1, job(target.name(), 0))), JOBS + "ListJobs": bytes,
            DIAGNOSTICS + "DescribeService": bytes}
    return good.get(method, lambda: message((1, "jobs/nobody")))() + UNKNOWN


def fields_family():
    for method in [*METHODS, TRAIN + "Train", TRAIN + "UploadWeights", REFLECTION]:
        if method != JOBS + "CreateJob":  # Descriptions have room where there is some.
            yield f"31 MiB of unknown fields to {method}", lambda target, method=method: refused_fields(
                target, method, unknown_fields_of(target, method))
    for method in (JOBS + "GetJob", JOBS + "AttachWorker", TRAIN + "Train", REFLECTION, STATE + "ReadState"):
        yield f"31 MiB of unknown fields to {method}, {AT_ONCE} at once", lambda target, method=method: refused_fields(
            target, method, unknown_fields_of(target, method), AT_ONCE)
    for what, (method, request) in KNOWN.items():
        yield what, lambda target, method=method, request=request: refused_fields(target, method, request)


# ---------------------------------------------------------------- size


def large_message(target, size, method=JOBS + "GetJob"):
    request = message((99, b"x" * size))
    with contextlib.closing(channel(target.address)) as connection:
        return target.errors(method, request, connection=connection)


def unfinished_messages(target, connections, announced, size):
    """Each says that a message of so many bytes comes, and sends a part of it, as far as the service lets it."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(RawConnection(target.address)) for _ in range(connections)]
        taken = at_once(connections, lambda: [send_unfinished(opened.pop(), announced, size)])
        if sum(taken) < min(100, connections) * MEBI // 8:
            raise AssertionError(f"the service took {sum(taken)} bytes only")
    return []


def send_unfinished(raw, announced, size):
    """How much was taken."""
    block = announced.to_bytes(4, "big").rjust(5, b"\x00") + bytes(size)
    windows = {0: 65535, 1: raw.await_service().get(4, 65535)}
    frames = raw.frames(seconds=0.5)
    sent = 0
    with contextlib.suppress(OSError):
        raw.send(frame(1, 4, 1, request_headers(JOBS + "GetJob")))
        while sent < size:
            part = block[sent:sent + min(16384, *windows.values())]
            if part:
                raw.send(frame(raw.DATA, 0, 1, part))
                sent += len(part)
                windows = {stream: window - len(part) for stream, window in windows.items()}
                continue
            kind, _, stream, payload = next(frames, (None, 0, 0, b""))
            if kind is None:
                break
            if kind == raw.WINDOW and stream in windows:
                windows[stream] += int.from_bytes(payload, "big")
    return sent


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
    for connections, mebi in ((1, 100), (8, 12)):
        yield f"a message of 4 GiB that goes on, {connections} of them", \
            lambda target, connections=connections, mebi=mebi: unfinished_messages(
                target, connections, (1 << 32) - 1, mebi * MEBI)
    # More than the service buffers.
    yield "40 messages of 31 MiB that do not end", lambda target: unfinished_messages(target, 40, 31 * MEBI, 30 * MEBI)
    for mebi in (1, 30, 60):
        yield f"a gzip of {mebi} MiB of zeros", \
            lambda target, mebi=mebi: gzip_bomb(target, JOBS + "GetJob", mebi * MEBI)
    yield "a gzip bomb to create a job", lambda target: gzip_bomb(target, JOBS + "CreateJob", 30 * MEBI)
    yield "8 gzip bombs at once", lambda target: gzip_bomb(target, JOBS + "GetJob", 10 * MEBI, 8)
    yield "a stream that compresses", gzip_stream


FAMILIES = {"descriptions": descriptions_family, "fields": fields_family, "size": size_family}
