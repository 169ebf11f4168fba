"""The wire as bytes: just enough of protobuf and HTTP/2 to say what no client library would.

Messages are built from (field number, value) pairs and taken apart into {field number: [values]}.
"""

import contextlib
import os
import pathlib
import socket
import struct
from urllib.parse import unquote

import grpc

JOBS, TRAIN, STATE, DIAGNOSTICS = (f"/ballast.v1.{name}Service/" for name in ("Job", "Train", "State", "Diagnostics"))
MEBI = 1 << 20


def varint(number):
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7f:
        out.append(number & 0x7f | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def message(*fields):
    """Values: int or bool, bytes or str (also for messages within), float for a double."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 1) + struct.pack("<d", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(out)


def _read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7f) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields_of(data):
    found = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind == 2:
            size, at = _read_varint(data, at)
            value, at = data[at:at + size], at + size
        else:
            size = {1: 8, 5: 4}[kind]
            value, at = data[at:at + size], at + size
        found.setdefault(tag >> 3, []).append(value)
    return found


def channel(address, *options):
    """A connection of its own, which does not pretend to be another's. With the environment of a client of
    Ballast's it speaks TLS and shows a token."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1),
               ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0), *options]
    authority, token = os.environ.get("BALLAST_TLS_CA"), os.environ.get("BALLAST_TOKEN_FILE")
    if authority is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(pathlib.Path(authority).read_bytes())
    return grpc.secure_channel(address, grpc.composite_channel_credentials(
        credentials, grpc.access_token_call_credentials(pathlib.Path(token).read_text().strip())), options=options)


def unary(connection, method, request, seconds=20, **options):
    return connection.unary_unary(method)(request, timeout=seconds, **options)


# ---------------------------------------------------------------- descriptions and steps

HYPER_PARAMETERS = message((1, 1e-3), (2, 0.9), (3, 0.999), (4, 1e-8), (5, 0.01), (6, 1), (7, 1), (8, 0), (9, 0))


def group(name="all"):
    return message((1, name), (2, HYPER_PARAMETERS), (3, 1), (4, 1))


def job(name, elements, chunk_elements=16384, parameters=1, *more, max_micro_steps=0):
    """Of one rank and `parameters` parameters of so many elements each, in all whole blocks."""
    total = elements * parameters
    return message(
        (1, f"jobs/{name}"), (2, 1), (3, group()),
        *((4, message((1, f"p{i}"), (2, elements), (4, 1))) for i in range(parameters)),
        *([(5, message((4, total)))] if total else []), (6, chunk_elements), (9, max_micro_steps), *more)


def open_train(name, uid, process, generation, rank=0):
    return message((1, f"jobs/{name}"), (2, uid), (3, rank), (4, process), (5, generation))


def train(kind, *fields):
    """A TrainRequest."""
    number = {"open": 1, "begin": 2, "gradient": 3, "end": 4, "seal": 5, "shared": 6, "discard": 7,
              "vote": 8}[kind]
    return message((number, message(*fields)))


def gradient(step, chunk, payload, begin=0, end=1, final=True, empty=False):
    header = message((1, step), (2, chunk), (3, begin), (4, end), (5, final), (6, empty))
    return train("gradient", (1, header), *([(2, payload)] if payload else []))


# ---------------------------------------------------------------- HTTP/2 without a library


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def request_headers(path, authority="x"):
    """Of a gRPC call, without compression: literal fields with literal names."""
    out = bytearray()
    for name, value in ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority),
                        ("content-type", "application/grpc"), ("te", "trailers")):
        out += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(out)


def request(path, stream, payload=b""):
    """The frames of a whole call."""
    data = b"\x00" + struct.pack(">I", len(payload)) + payload
    return frame(1, 4, stream, request_headers(path)) + frame(0, 1, stream, data)


class Headers:
    """Takes headers of a gRPC service apart: HPACK without Huffman's code, which gRPC's core does not use for text."""

    STATIC = 61

    def __init__(self):
        self.table = []  # The newest first.

    def _number(self, data, at, bits):
        value = data[at] & ((1 << bits) - 1)
        at += 1
        if value == (1 << bits) - 1:
            more, at = _read_varint(data, at)
            value += more
        return value, at

    def _text(self, data, at):
        is_huffman = data[at] & 0x80
        size, at = self._number(data, at, 7)
        return ("?" if is_huffman else data[at:at + size].decode("latin-1")), at + size

    def _name(self, index):
        return f"static {index}" if index <= self.STATIC else self.table[index - self.STATIC - 1][0]

    def read(self, data):
        """{name: value}; of a name of the static table, its number."""
        found, at = {}, 0
        while at < len(data):
            byte = data[at]
            if byte & 0x80:
                index, at = self._number(data, at, 7)
                if index > self.STATIC:
                    name, value = self.table[index - self.STATIC - 1]
                    found[name] = value
                continue
            if byte & 0xe0 == 0x20:  # The table's size.
                _, at = self._number(data, at, 5)
                continue
            is_kept = byte & 0x40
            index, at = self._number(data, at, 6 if is_kept else 4)
            if index:
                name = self._name(index)
            else:
                name, at = self._text(data, at)
            value, at = self._text(data, at)
            found[name] = value
            if is_kept:
                self.table.insert(0, (name, value))
        return found


CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class RawConnection:
    """A connection on which frames are written as they are given."""

    HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION, DATA = 1, 3, 4, 6, 7, 8, 9, 0
    END_STREAM, END_HEADERS = 1, 4

    def __init__(self, address, preface=True, source="", settings=b""):
        """address: also unix:PATH. source: of the loopback, for a peer that passes for another host."""
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(60)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, port = address.rsplit(":", 1)
            self.socket = socket.create_connection((host, int(port)), timeout=60, source_address=(source, 0))
        self.headers, self.unread = Headers(), b""
        if preface:
            self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(self.SETTINGS, 0, 0, settings))

    def send(self, data):
        self.socket.sendall(data)

    def frames(self, seconds):
        """(kind, flags, stream, payload) of each frame that comes, until nothing has come for so long, or the end."""
        self.socket.settimeout(seconds)
        while True:
            while len(self.unread) >= 9 and len(self.unread) >= 9 + int.from_bytes(self.unread[:3], "big"):
                size = int.from_bytes(self.unread[:3], "big")
                kind, flags, stream = self.unread[3], self.unread[4], int.from_bytes(self.unread[5:9], "big")
                payload, self.unread = self.unread[9:9 + size], self.unread[9 + size:]
                yield kind, flags, stream, payload
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            self.unread += data

    def await_service(self, seconds=60):
        """The service's settings, {number: value}, which are acknowledged. It takes calls from then on."""
        for kind, flags, _, payload in self.frames(seconds):
            if kind == self.SETTINGS and not flags:
                self.send(frame(self.SETTINGS, 1, 0))
                return {int.from_bytes(payload[at:at + 2], "big"): int.from_bytes(payload[at + 2:at + 6], "big")
                        for at in range(0, len(payload), 6)}
        raise AssertionError("the service says nothing on a connection")

    def errors(self, seconds):
        """What calls were answered with, as (code, message), without those that went well."""
        found = []
        for kind, _, _, payload in self.frames(seconds):
            if kind != self.HEADERS:
                continue
            headers = self.headers.read(payload)
            if headers.get("grpc-status", "0") != "0":
                found.append((CODES[int(headers["grpc-status"])], unquote(headers.get("grpc-message", ""))))
        return found

    def is_open(self):
        self.socket.settimeout(1)
        with contextlib.suppress(TimeoutError):
            try:
                while self.socket.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
            return False
        return True

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
