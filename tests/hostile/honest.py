"""The honest job beside the attacks: one rank that trains without an end, as a process of its own.

    honest.py ADDRESS FILE [--steps N] [--pause SECONDS] [--chunks N] [--chunk ELEMENTS]

It writes a line for each step to FILE: its number, the CRC of the weights that came back, and the time.
When its stream breaks it attaches again and goes on from what is committed, as every client does, and
writes "broken". A step whose weights it did not see has no CRC.
"""

import argparse
import queue
import random
import sys
import time
import zlib

import grpc
from wire import JOBS, TRAIN, channel, fields_of, gradient, job, message, open_train, train, unary

PATIENCE = 30  # Seconds for what takes milliseconds.


def payloads(elements):
    """Finite bf16 numbers of one size and either sign."""
    draw = random.Random(1)
    signs = bytes(0xbc if byte & 1 else 0x3c for byte in range(256))
    found = []
    for _ in range(11):
        payload = bytearray(2 * elements)
        payload[0::2] = draw.randbytes(elements)
        payload[1::2] = draw.randbytes(elements).translate(signs)
        found.append(bytes(payload))
    return found


class Honest:
    def __init__(self, address, name, chunks, chunk_elements):
        self.address, self.name, self.process = address, name, f"{name}:1"
        self.chunks, self.chunk_elements = chunks, chunk_elements
        self.payloads = payloads(chunk_elements)
        self.connection = channel(address)
        created = fields_of(unary(self.connection, JOBS + "CreateJob", message(
            (1, job(name, chunks * chunk_elements, chunk_elements))), PATIENCE))
        self.uid = created[10][0].decode()
        self.committed = 0
        self.attach()
        self.upload()

    def attach(self):
        answer = fields_of(unary(self.connection, JOBS + "AttachWorker", message(
            (1, f"jobs/{self.name}"), (3, self.process), (4, self.uid)), PATIENCE))
        self.generation = answer[3][0]
        self.committed = answer.get(4, [0])[0]

    def opening(self):
        return open_train(self.name, self.uid, self.process, self.generation)

    def upload(self):
        zeros = bytes(4 * self.chunk_elements)
        requests = [message((1, self.opening()))] + [
            message((2, message((1, message((2, chunk))), (2, zeros)))) for chunk in range(self.chunks)]
        self.connection.stream_unary(TRAIN + "UploadWeights")(iter(requests), timeout=PATIENCE)

    def steps(self, most, pause):
        """(step, CRC or None); None alone for a stream that broke."""
        while self.committed < most:
            try:
                yield from self.run(most, pause)
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED,
                                        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED):
                    raise
                print(f"broken: {error.code().name} {error.details()}", file=sys.stderr, flush=True)
                yield None
                self.return_to_job()

    def return_to_job(self):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self.attach()
                return
            except grpc.RpcError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
                self.connection.close()
                self.connection = channel(self.address)

    def run(self, most, pause):
        sent = queue.SimpleQueue()
        answers = self.connection.stream_stream(TRAIN + "Train")(iter(sent.get, None))
        try:
            sent.put(message((1, self.opening())))
            while self.committed < most:
                step = self.committed + 1
                sent.put(train("begin", (1, step)))
                for chunk in range(self.chunks):
                    sent.put(gradient(step, chunk, self.payloads[(step + chunk) % len(self.payloads)]))
                sent.put(train("end", (1, step), (3, 1)))
                sent.put(train("seal", (1, step), (2, 1), (4, b"")))
                yield step, self.receive(answers, step)
                self.committed = step
                time.sleep(pause)
        finally:
            sent.put(None)
            answers.cancel()

    def receive(self, answers, step):
        weights = {}
        for answer in answers:
            kinds = fields_of(answer)
            if 6 in kinds:
                chunk = fields_of(kinds[6][0])
                weights[fields_of(chunk[1][0]).get(2, [0])[0]] = chunk[2][0]
            if 3 in kinds:
                raise AssertionError(f"seal of step {step} refused: {fields_of(kinds[3][0])[2][0].decode()}")
            if 7 in kinds:
                break
        if len(weights) != self.chunks:
            raise AssertionError(f"{len(weights)} of {self.chunks} chunks came back of step {step}")
        return zlib.crc32(b"".join(weights[chunk] for chunk in range(self.chunks)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=16384)
    words = parser.parse_args()
    with open(words.file, "w", encoding="ascii", buffering=1) as out:
        for done in Honest(words.address, "honest", words.chunks, words.chunk).steps(words.steps, words.pause):
            out.write("broken\n" if done is None else f"{done[0]} {done[1]} {time.monotonic()}\n")


if __name__ == "__main__":
    main()
