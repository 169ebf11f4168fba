"""A rank of a Ballast job in Python: plain grpcio, and what the files of proto/ballast/v1 say.

Nothing of Ballast's own client is used here, so this is also the proof that the protocol's page is enough.
The modules ballast.v1.* are protoc's (foreign_test.py makes them).
"""

import array
import collections
import mmap
import os
import queue
import socket

import grpc
import numpy as np

from ballast.v1 import jobs_pb2 as jobs_pb
from ballast.v1 import jobs_pb2_grpc as jobs_rpc
from ballast.v1 import train_pb2 as train_pb
from ballast.v1 import train_pb2_grpc as train_rpc
from google.rpc import status_pb2

SECONDS = 30  # For any one answer.
DTYPES = {jobs_pb.BF16: np.dtype("<u2"), jobs_pb.FP16: np.dtype("<f2"), jobs_pb.FP32: np.dtype("<f4")}


def reason_of(error):
    """ErrorInfo.reason of an RpcError; empty if the error is gRPC's own."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = status_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason
    return ""


class Chunk:
    def __init__(self, group, begin, end):
        self.group, self.begin, self.end = group, begin, end
        self.elements = end - begin


def chunks_of(job, rank):
    """The rank's chunks, in the order of their indices."""
    chunks = []
    for piece in sorted((p for p in job.partitions if p.rank == rank), key=lambda p: (p.group, p.begin)):
        for begin in range(piece.begin, piece.end, job.chunk_elements):
            chunks.append(Chunk(piece.group, begin, min(begin + job.chunk_elements, piece.end)))
    return chunks


def round_up(size, unit):
    return (size + unit - 1) // unit * unit


class SharedMemory:
    """The rank's memory file, mapped; `gradients` and `weights` are arrays by chunk."""

    def __init__(self, offer, job, chunks):
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(SECONDS)
        self.connection.connect("\0" + offer.socket)
        self.connection.send(offer.token)
        answer, control, _, _ = self.connection.recvmsg(513, socket.CMSG_SPACE(4))
        if answer[:1] != b"G":
            raise RuntimeError(f"no shared memory: {answer[1:].decode()}")
        files = array.array("i")
        files.frombytes(control[0][2][:4])
        self.memory = mmap.mmap(files[0], os.fstat(files[0]).st_size)
        os.close(files[0])
        self.gradients, self.weights = {}, {}
        end = 0
        for arrays, dtype in ((self.gradients, "wire_dtype"), (self.weights, "return_dtype")):
            for index, chunk in enumerate(chunks):
                of = DTYPES[getattr(job.groups[chunk.group], dtype)]
                arrays[index] = np.frombuffer(self.memory, of, chunk.elements, end)
                end = round_up(end + arrays[index].nbytes, 64)
            end = round_up(end, 4096)
        if end != len(self.memory):
            raise RuntimeError(f"the memory has {len(self.memory)} bytes, not {end}")


class Rank:
    """One rank in one process. Calls come in the order attach, upload (if awaiting weights), open, steps."""

    def __init__(self, channel, name, rank, process_id):
        self.jobs, self.train = jobs_rpc.JobServiceStub(channel), train_rpc.TrainServiceStub(channel)
        self.name, self.rank, self.process_id = name, rank, process_id
        self.shared = None
        self.uid = ""
        self.guesses = 0  # Provisional weights that became the step's.
        self.requests = None

    def attach(self, speculate=False, shared=False):
        request = jobs_pb.AttachWorkerRequest(
            name=self.name, rank=self.rank, process_id=self.process_id, uid=self.uid, rejoin=self.uid != "",
            shared_memory=shared)
        self.attached = self.jobs.AttachWorker(request, timeout=SECONDS)
        self.uid, self.job = self.attached.uid, self.attached.job
        self.committed_step = self.attached.committed_step
        self.mode = jobs_pb.SPECULATE if speculate else jobs_pb.WAIT
        self.chunks = chunks_of(self.job, self.rank)
        self.shared = None
        if shared and self.attached.HasField("shared_memory"):
            self.shared = SharedMemory(self.attached.shared_memory, self.job, self.chunks)
        return self.attached

    def _open_message(self):
        return train_pb.OpenTrain(name=self.name, uid=self.uid, rank=self.rank, process_id=self.process_id,
                            generation=self.attached.generation)

    def upload(self, weights, step=0, update_counts=()):
        """First weights: `weights(chunk)` is an fp32 array of the chunk's elements. From a step on that others have
        made: with its moments behind them."""

        def messages():
            message = self._open_message()
            if step > 0:
                message.first_state.step = step
                message.first_state.update_counts.extend(update_counts)
            yield train_pb.UploadWeightsRequest(open=message)
            for index, chunk in enumerate(self.chunks):
                payload = weights(chunk).astype("<f4").tobytes()
                yield train_pb.UploadWeightsRequest(
                    weights=train_pb.WeightChunk(header=train_pb.WeightHeader(chunk=index, step=step), payload=payload))

        answer = self.train.UploadWeights(messages(), timeout=SECONDS)
        if answer.chunks != len(self.chunks):
            raise RuntimeError(f"the service took {answer.chunks} of {len(self.chunks)} chunks")
        self.committed_step = step

    def open(self, seconds=10 * SECONDS):
        """Its stream ends after so long; with None when the channel is closed."""
        self.requests = queue.SimpleQueue()
        self.refusals = collections.Counter()  # Of votes, by step and attempt.
        message = self._open_message()
        message.update_mode = self.mode
        message.weights_in_shared_memory = self.shared is not None
        message.orthogonalizes = True
        self.sent = self.acknowledged = 0
        self.attempt = 0
        self._send(open=message)
        self.responses = self.train.Train(iter(self.requests.get, None), timeout=seconds)
        self.weights = {}
        self.provisional = {}
        opened = self._next("opened")
        if opened.committed_step != self.committed_step:
            raise RuntimeError(f"the job went on to step {opened.committed_step}")
        self.read_weights()

    def close(self):
        if self.requests is not None:
            self.requests.put(None)
            for _ in self.responses:  # What is queued; then the stream ends.
                pass
            self.requests = None

    def _send(self, **kind):
        self.sent += 1  # Of shared gradients, each chunk counts; here a message has one.
        self.requests.put(train_pb.TrainRequest(**kind))

    def _next(self, *wanted):
        """The next message of these kinds; what comes before it is taken in."""
        for message in self.responses:
            kind = message.WhichOneof("kind")
            value = getattr(message, kind)
            if kind == "acknowledged":
                self.acknowledged = value.messages
            elif kind == "weights":
                self._take(value.header.chunk, value.payload, value.header.provisional)
            elif kind == "shared_weights":
                for chunk in value.chunks:
                    self._take(chunk, self.shared.weights[chunk].tobytes(), value.provisional)
            elif kind == "vote_refused":
                self.refusals[value.step, value.attempt] += 1
            if kind in (*wanted, "seal_refused", "vote_refused"):
                return value
        raise RuntimeError("the stream ended")

    def _take(self, chunk, payload, provisional):
        dtype = DTYPES[self.job.groups[self.chunks[chunk].group].return_dtype]
        (self.provisional if provisional else self.weights)[chunk] = np.frombuffer(payload, dtype)

    def read_weights(self):
        """The committed weights of this rank's chunks."""
        if not self.chunks:
            return
        request = train_pb.ReadWeightsRequest(name=self.name, uid=self.uid, rank=self.rank)
        for message in self.train.ReadWeights(request, timeout=SECONDS):
            if message.WhichOneof("kind") == "weights":
                self._take(message.weights.header.chunk, message.weights.payload, False)

    def begin(self, **settings):
        self.provisional = {}
        self._send(begin_step=train_pb.BeginStep(step=self.committed_step + 1, attempt=self.attempt, **settings))

    def discard(self):
        """Takes back what this rank has given of the step, for another try at it."""
        self._send(discard=train_pb.Discard(step=self.committed_step + 1, attempt=self.attempt))
        answer = self._next("discarded")
        while not isinstance(answer, train_pb.Discarded):  # Its seal may be refused meanwhile.
            answer = self._next("discarded")
        self.attempt = answer.attempt
        self.provisional = {}

    def gradient(self, chunk, values, micro_step, final, may_guess=False):
        """`values`: the chunk's sum over ranks in the wire dtype; None: no gradient."""
        header = train_pb.GradientHeader(step=self.committed_step + 1, chunk=chunk, micro_step_begin=micro_step,
                                   micro_step_end=micro_step + 1, final=final, empty=values is None,
                                   attempt=self.attempt, may_guess=may_guess)
        if self.shared is None or values is None:
            payload = b"" if values is None else values.tobytes()
            self._send(gradient=train_pb.GradientChunk(header=header, payload=payload))
        else:
            self.shared.gradients[chunk][:] = values
            self._send(shared_gradients=train_pb.SharedGradients(
                step=header.step, attempt=self.attempt, micro_step_begin=micro_step, micro_step_end=micro_step + 1,
                final=final, may_guess=may_guess, chunks=[chunk]))
            self.await_acknowledgement()  # A place may be written again only then.

    def await_acknowledgement(self):
        while self.acknowledged < self.sent:
            self._next("acknowledged")

    def end_micro_step(self, micro_step, used=None):
        self._send(end_micro_step=train_pb.EndMicroStep(
            step=self.committed_step + 1, attempt=self.attempt, micro_step=micro_step, all_used=used is None,
            used_parameters=used or ()))

    def _voting(self, vote):
        if vote is None:
            return None
        voting = train_pb.Vote(refusals=self.refusals[self.committed_step + 1, self.attempt])
        voting.MergeFrom(vote)
        return voting

    def seal(self, micro_steps, vote=None, report=None):
        """Without a vote the norm comes, and the vote after it."""
        self._send(seal=train_pb.Seal(step=self.committed_step + 1, attempt=self.attempt, micro_steps=micro_steps,
                                vote=self._voting(vote), report=report))

    def norm(self):
        """The norm, or the refusal of the seal."""
        return self._next("norm")

    def vote(self, vote):
        self._send(vote=train_pb.CastVote(step=self.committed_step + 1, attempt=self.attempt,
                                          vote=self._voting(vote)))

    def decision(self):
        """The decision, or the refusal of the seal or of the votes."""
        decision = self._next("decision")
        if isinstance(decision, train_pb.StepDecision) and decision.applied:
            kept = set(self.provisional) - set(decision.dropped_chunks)
            self.guesses += len(kept)
            self.weights.update({chunk: self.provisional[chunk] for chunk in kept})
        return decision

    def directions(self):
        """After a decision, in a job whose workers orthogonalize: those of this rank's chunks of matrices, by chunk as
        bf16, and the hyper-parameters of the step by group. None: there is no second round, and the step is committed."""
        message = self._next("directions", "committed")
        if isinstance(message, train_pb.StepCommitted):
            self._committed(message)
            return None
        request = train_pb.ReadWeightsRequest(name=self.name, uid=self.uid, rank=self.rank, step=message.step, directions=True,
                                              process_id=self.process_id if self.shared is not None else "")
        values, directions = [], {}
        for message in self.train.ReadWeights(request, timeout=SECONDS):
            values += message.hyper_parameters
            if message.WhichOneof("kind") == "weights":
                chunk = message.weights.header.chunk
                if message.weights.header.shared != (self.shared is not None):
                    raise RuntimeError(f"directions of chunk {chunk} came another way than gradients")
                data = self.shared.weights[chunk].tobytes() if self.shared is not None else message.weights.payload
                directions[chunk] = np.frombuffer(data, "<u2", self.chunks[chunk].elements)
        return values, directions

    def give_orthogonal(self, orthogonal):
        """What became of the directions, by chunk, as bf16."""
        def messages():
            message = self._open_message()
            message.orthogonal_step = self.committed_step + 1
            message.weights_in_shared_memory = self.shared is not None
            yield train_pb.UploadWeightsRequest(open=message)
            for chunk, values in orthogonal.items():
                header = train_pb.WeightHeader(chunk=chunk, step=message.orthogonal_step)
                if self.shared is None:
                    yield train_pb.UploadWeightsRequest(
                        weights=train_pb.WeightChunk(header=header, payload=values.tobytes()))
                    continue
                self.shared.gradients[chunk].view("<u2")[:values.size] = values
                yield train_pb.UploadWeightsRequest(weights=train_pb.WeightChunk(header=header))

        self.train.UploadWeights(messages(), timeout=SECONDS)

    def await_commit(self):
        self._committed(self._next("committed"))

    def _committed(self, message):
        self.committed_step = message.step
        self.attempt = 0
