"""Attacks by processes of the service's own host: the family "host", on its unix socket, and on the one over which memory
is shared with workers."""

import contextlib
import os
import socket
import time

from attacks import Target, at_once
from connection_attacks import idle_connections, many_streams, raw_frames
from frame_attacks import PING, unread
from size_attacks import fields
from wire import HYPER_PARAMETERS, JOBS, MEBI, STATE, TRAIN, RawConnection, fields_of, frame, message, request

TOKEN_BYTES = 32
SECONDS = 20


class Host:
    def __init__(self, unix_address):
        self.unix = Target(unix_address)

    def answers(self):
        if errors := self.unix.errors(JOBS + "ListJobs", b""):
            raise AssertionError(f"nobody is answered on the unix socket: {errors}")

    def on_unix(self, attack):
        def attacked(_):
            errors = attack(self.unix)
            self.answers()
            return errors
        return attacked

    @staticmethod
    @contextlib.contextmanager
    def offer(target, elements=512):
        """A job with an offer of memory: (its socket's name, the token)."""
        with target.job(elements=elements) as (name, _, _):
            error, answer = target.ask(JOBS + "AttachWorker", message((1, f"jobs/{name}"), (3, "evil"), (9, 1)))
            if error:
                raise AssertionError(f"attaching: {error}")
            offer = fields_of(fields_of(answer)[7][0])
            yield "\0" + offer[1][0].decode(), offer[2][0]

    @staticmethod
    def connect(name):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(name)  # Waits where the service has not accepted those before.
        peer.settimeout(SECONDS)
        return peer

    def show(self, name, words):
        """What the peer is refused with."""
        with self.connect(name) as peer:
            with contextlib.suppress(ConnectionError):
                peer.send(words)
                answer, control, _, _ = peer.recvmsg(2048, socket.CMSG_SPACE(4))
                if answer[:1] == b"G" or control:
                    raise AssertionError("it was given memory")
                return [("REFUSED", answer[1:].decode())] if answer else []
        return []

    def wrong_tokens(self, target):
        with self.offer(target) as (name, token):
            errors = []
            for words in (b"", b"x", bytes(TOKEN_BYTES), token[:-1], token + b"x", token[:-1] + bytes([token[-1] ^ 1]),
                          os.urandom(TOKEN_BYTES), b"x" * 60_000):
                errors += self.show(name, words)
            self.granted(name, token)
            return errors

    def granted(self, name, token):
        with self.connect(name) as peer:
            peer.send(token)
            answer, control, _, _ = peer.recvmsg(2048, socket.CMSG_SPACE(4))
            if answer != b"G" or not control:
                raise AssertionError(f"the owner of the token was told {answer!r}")
            os.close(int.from_bytes(control[0][2][:4], "little"))

    def token_again(self, target):
        with self.offer(target) as (name, token):
            self.granted(name, token)
            return self.show(name, token)

    def silent_peers(self, target):
        """More than may say nothing; one that has a token still gets its memory."""
        with self.offer(target) as (name, token), contextlib.ExitStack() as stack:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    stack.enter_context(self.connect(name))
            self.granted(name, token)
        return []

    def descriptors(self, target):
        """Descriptors that the service did not ask for, with each message."""
        with self.offer(target) as (name, token):
            for _ in range(200):
                with self.connect(name) as peer, contextlib.suppress(OSError):
                    socket.send_fds(peer, [os.urandom(TOKEN_BYTES)], [0] * 100)
            self.granted(name, token)
        return []

    def after_the_grant(self, target):
        """Words where there should be none: the memory is lost, and nothing else."""
        with self.offer(target) as (name, token):
            with self.connect(name) as peer:
                peer.send(token)
                peer.recvmsg(2048, socket.CMSG_SPACE(4))
                with contextlib.suppress(OSError):
                    for _ in range(1000):
                        peer.send(b"x" * 1000, socket.MSG_DONTWAIT)
        return target.errors(JOBS + "ListJobs", b"")

    def offers_of_others(self, target):
        """One job's ranks take all offers that there are; another's still get some."""
        ranks = 4200
        name = target.name()
        ranges = b"".join(message((5, message((1, rank), (3, 256 * rank), (4, 256 * rank + 256)))) for rank in range(ranks))
        description = message((1, f"jobs/{name}"), (2, ranks), (3, message((1, "all"), (2, HYPER_PARAMETERS)))) + \
            message((4, message((1, "p"), (2, 256 * ranks), (4, 1)))) + ranges + message((6, 256))
        if errors := target.errors(JOBS + "CreateJob", message((1, description)), seconds=60):
            raise AssertionError(f"the attacker's own job: {errors}")
        offered = 0
        for first in range(0, ranks, 500):  # No more than there may be at once.
            calls = [target.connection.unary_unary(JOBS + "AttachWorker").future(message(
                (1, f"jobs/{name}"), (2, rank), (3, f"evil-{rank}"), (9, 1)), timeout=60)
                for rank in range(first, min(first + 500, ranks))]
            offered += sum(7 in fields_of(call.result()) for call in calls)
        if offered < 4096:
            raise AssertionError(f"only {offered} offers were made: they are not what they were")
        with self.offer(target) as (socket_name, token):
            self.granted(socket_name, token)
        target.close(name)
        return []

    def family(self):
        for what, data in (("noise", os.urandom(100_000)), ("HTTP/1", b"GET / HTTP/1.1\r\n\r\n"),
                           ("data on no stream", frame(0, 0, 1, b"x" * 100)),
                           ("a frame of 16 MB", b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 100_000),
                           ("no such method", request("/x/y", 1)), ("a request of noise", request(JOBS + "GetJob", 1, b"\xff"))):
            yield f"a unix socket that gets {what}", self.on_unix(lambda target, data=data: raw_frames(target, data))
        yield "500 silent connections of a unix socket", self.on_unix(
            lambda target: idle_connections(target, 500, b""))
        yield "2,000 silent streams of a unix socket", self.on_unix(
            lambda target: many_streams(target, 2000, TRAIN + "Train"))
        yield "31 MiB of unknown fields over a unix socket, 8 at once", self.on_unix(lambda target: at_once(
            8, lambda: fields(target, STATE + "SaveJob", message((1, "jobs/honest")) + b"\x7a\x00" * (15 * MEBI)))[:3])
        yield "200,000 pings over a unix socket", self.on_unix(lambda target: unread(target, PING, 200_000))
        yield "resets on a unix socket", self.on_unix(unix_resets)
        yield "wrong tokens for memory", self.wrong_tokens
        yield "a token for memory twice", self.token_again
        yield "600 silent peers that want memory", self.silent_peers
        yield "descriptors with wrong tokens", self.descriptors
        yield "words after the memory", self.after_the_grant
        yield "offers of memory for 4,200 ranks", self.offers_of_others


def unix_resets(target):
    """Some thousand: connections of a unix socket have no names, so none is closed for them."""
    with RawConnection(target.address) as raw:
        for first in range(1, 2000, 200):
            raw.send(b"".join(request(JOBS + "ListJobs", stream) + frame(3, 0, stream, b"\x00\x00\x00\x08")
                              for stream in range(first, first + 200, 2)))
        time.sleep(0.2)
    return []
