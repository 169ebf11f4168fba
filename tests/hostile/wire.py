"""The wire as bytes: just enough of protobuf and HTTP/2 to say what no client library would.

Messages are built from (field number, value) pairs and taken apart into {field number: [values]}.
"""

import os
import pathlib
import socket
import struct

import grpc

JOBS, TRAIN, STATE = (f"/ballast.v1.{name}Service/" for name in ("Job", "Train", "State"))
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


class RawConnection:
    """A connection on which frames are written as they are given."""

    HEADERS, RESET, SETTINGS, WINDOW, CONTINUATION, DATA = 1, 3, 4, 8, 9, 0
    END_STREAM, END_HEADERS = 1, 4

    def __init__(self, address, preface=True):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        if preface:
            self.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(self.SETTINGS, 0, 0))

    def send(self, data):
        self.socket.sendall(data)

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
