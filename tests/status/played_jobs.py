"""Jobs that ranks in Python play against a service, through the client of tests/foreign: one that trains on,
and one of which a rank stops in the middle of a step.

    played_jobs.py ADDRESS PROTO_FOLDER     plays both until it is stopped, to look at the page by hand
"""

import contextlib
import math
import pathlib
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "foreign"), str(HERE.parent / "cpu_optimizer_service/parity")]

import foreign_test  # noqa: E402
import grpc  # noqa: E402
import numpy as np  # noqa: E402
import numpy_adam  # noqa: E402

BLOCK = 256
PACE_SECONDS = 0.15  # A backward pass.
HANGS_AFTER = 6      # Steps.
HANGING_RANK = 1


class PlayedJob:
    """Ranks in threads of this process. They end with `stop`, and with the service."""

    def __init__(self, channel, client, name, world, hangs):
        self.channel, self.client, self.pb = channel, client, client.jobs_pb
        self.name, self.world, self.hangs = name, world, hangs
        self.stopped = threading.Event()
        self.stuck = threading.Event()  # The rank that hangs has begun to.
        self.jobs = client.jobs_rpc.JobServiceStub(channel)
        self.jobs.CreateJob(self.pb.CreateJobRequest(job=self.describe()), timeout=30)
        self.barrier = threading.Barrier(world)
        self.threads = [threading.Thread(target=self.run, args=(rank,), daemon=True) for rank in range(world)]
        for thread in self.threads:
            thread.start()

    def describe(self):
        job = self.pb.Job(name=self.name, world_size=self.world, chunk_elements=16 * BLOCK,
                          unused_policy=self.pb.ZERO)
        job.groups.add(name="decay", hyper_parameters=self.pb.HyperParameters(
            lr=6e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decoupled_weight_decay=True,
            bias_correction=True, amsgrad=False, maximize=False))
        job.groups.add(name="no_decay", hyper_parameters=self.pb.HyperParameters(
            rule=self.pb.SGD, lr=6e-4, weight_decay=0.0, momentum=0.9, dampening=0.0, nesterov=True, maximize=False))
        shapes = [("wte.weight", [320, 32])]
        for layer in range(4):
            shapes += [(f"h.{layer}.attn.weight", [96, 32]), (f"h.{layer}.attn.bias", [96]),
                       (f"h.{layer}.mlp.weight", [128, 32]), (f"h.{layer}.mlp.bias", [128])]
        flat = [0, 0]
        for name, shape in shapes:
            group = 0 if name.endswith("weight") else 1
            job.parameters.add(name=name, shape=shape, group=group, trainable=True)
            flat[group] += math.prod(shape)
        for group, elements in enumerate(flat):
            blocks = math.ceil(elements / BLOCK)
            for rank in range(self.world):
                begin, end = (blocks * r // self.world * BLOCK for r in (rank, rank + 1))
                if end > begin:
                    job.partitions.add(rank=rank, group=group, begin=begin, end=end)
        return job

    def run(self, number):
        try:
            self.play(number)
        except (grpc.RpcError, RuntimeError, ValueError, threading.BrokenBarrierError):
            self.barrier.abort()  # The service has ended, or another rank has.

    def play(self, number):
        np.seterr(all="ignore")  # Of this thread: an infinity is part of it.
        random = np.random.default_rng(number)
        rank = self.client.Rank(self.channel, f"jobs/{self.name}", number, f"{self.name}-{number}")
        rank.attach()
        ends = self.ends_of(rank.job)

        def unpadded(chunk, values):
            values[max(0, min(chunk.elements, ends[chunk.group] - chunk.begin)):] = 0
            return values

        rank.upload(lambda chunk: unpadded(chunk, random.normal(0, 0.02, chunk.elements).astype(np.float32)))
        self.barrier.wait(30)
        rank.open(seconds=None)  # For as long as the tests look at it.
        while not self.stopped.is_set():
            step = rank.committed_step + 1
            size = 0.006 * (1 + 1.5 * math.exp(-step / 12)) * (1 + 0.2 * math.sin(step / 3))
            rank.begin()
            rank.await_acknowledgement()  # So that the service counts all of the pass.
            for index in range(len(rank.chunks)):
                if self.hangs and number == HANGING_RANK and step > HANGS_AFTER and index >= len(rank.chunks) // 2:
                    self.stuck.set()
                    self.stopped.wait()
                    return
                time.sleep(PACE_SECONDS / len(rank.chunks) * (1 + 0.5 * number))
                chunk = rank.chunks[index]
                made = random.normal(0, size, chunk.elements).astype(np.float32)
                if step % 25 == 9 and index == 0:
                    made[0] = np.inf
                rank.gradient(index, numpy_adam.to_bfloat16(unpadded(chunk, made)), 0, True)
            rank.end_micro_step(0)
            rank.seal(1, self.client.train_pb.Vote(clipping=self.pb.Clipping(max_norm=1.0)), self.report(number, step))
            rank.decision()
            rank.await_commit()

    def report(self, number, step):
        """Every rank tells its own; a loss that explodes is not finite."""
        loss = math.nan if step % 25 == 10 else 2 + 3 * math.exp(-step / 20) + 0.001 * number
        return self.client.train_pb.RankReport(
            numbers={"loss": loss, "tokens_per_second": 1000.0 + step, "eval/accuracy": step / 1000},
            seconds=self.client.train_pb.RankSeconds(compute=PACE_SECONDS * (1 + number), reduce=0.01, send=0.005,
                                                     wait=0.05))

    def others_wait(self, seconds):
        """True once every rank but the one that hangs has sealed the step."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ranks = self.jobs.GetJob(self.pb.GetJobRequest(name=f"jobs/{self.name}"), timeout=30).ranks
            if all(rank.sealed == (rank.rank != HANGING_RANK) for rank in ranks):
                return True
            time.sleep(0.01)
        return False

    @staticmethod
    def ends_of(job):
        ends = [0] * len(job.groups)
        for parameter in job.parameters:
            ends[parameter.group] += math.prod(parameter.shape)
        return ends


@contextlib.contextmanager
def played(address, proto):
    """Two jobs, "steady" and "stuck", once the rank of the second one hangs."""
    with tempfile.TemporaryDirectory() as folder:
        foreign_test.generate(pathlib.Path(proto), folder)
        import ballast_client as client
        with grpc.insecure_channel(address) as channel:
            jobs = [PlayedJob(channel, client, "steady", 2, False), PlayedJob(channel, client, "stuck", 3, True)]
            try:
                if not jobs[1].stuck.wait(60) or not jobs[1].others_wait(60):
                    raise AssertionError("the job that is to hang does not come so far")
                yield jobs
            finally:
                for job in jobs:
                    job.stopped.set()
                channel.close()  # Ends what ranks wait for.
                for thread in (thread for job in jobs for thread in job.threads):
                    thread.join(5)


if __name__ == "__main__":
    with played(*sys.argv[1:3]):
        threading.Event().wait()
