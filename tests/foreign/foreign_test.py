"""Random jobs of a client in another language, held to a NumPy model bit for bit.

    foreign_test.py BALLASTD PROTO_FOLDER [JOBS [SEED]]

/usr/bin/python3 with Debian's python3-grpcio and python3-numpy; protoc and grpc_python_plugin from
protobuf-compiler and protobuf-compiler-grpc. (python3-grpc-tools of Debian 12 has a protoc that does not know
`optional` yet.)
"""

import collections
import math
import pathlib
import signal
import subprocess
import sys
import tempfile

try:
    import grpc
    import numpy as np
except ImportError as error:
    sys.exit(f"{error.name} is missing: install python3-grpcio and python3-numpy")

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "cpu_optimizer_service/parity"), str(HERE.parent / "support")]
import numpy_adam  # noqa: E402
import numpy_rules  # noqa: E402
import processes  # noqa: E402

BLOCK = 256
SQUARES = ("EXP_AVG_SQ", "MAX_EXP_AVG_SQ", "SUM")


def planes_of(h):
    """Of a group with these hyper-parameters, in the order of Plane."""
    return {"ADAM": ("MASTER", "EXP_AVG", "EXP_AVG_SQ", *(["MAX_EXP_AVG_SQ"] if h.amsgrad else [])),
            "SGD": ("MASTER", *(["MOMENTUM_BUFFER"] if h.momentum else [])), "LION": ("MASTER", "EXP_AVG"),
            "ADAGRAD": ("MASTER", "SUM"), "SIGN_SGD": ("MASTER",),
            "MUON": ("MASTER", "MOMENTUM_BUFFER")}[jobs_pb.Rule.Name(h.rule)]


def generate(proto, out):
    """Makes the modules of the protocol and puts them where import finds them."""
    subprocess.run(
        ["protoc", f"-I{proto}", f"--python_out={out}", f"--grpc_out={out}",
         "--plugin=protoc-gen-grpc=/usr/bin/grpc_python_plugin",
         *(str(proto / "ballast/v1" / f"{part}.proto") for part in ("diagnostics", "jobs", "state", "train")),
         str(proto / "google/rpc/status.proto")], check=True)
    sys.path.insert(0, out)
    import google

    google.__path__ = list(google.__path__) + [f"{out}/google"]


def encode(values, dtype):
    """fp32 values in a wire dtype, as the client sends them."""
    if dtype == jobs_pb.BF16:
        return numpy_adam.to_bfloat16(values)
    return values.astype(np.float16) if dtype == jobs_pb.FP16 else values


def decode(values, dtype):
    return numpy_adam.from_bfloat16(values) if dtype == jobs_pb.BF16 else values.astype(np.float32)


def bits(values):
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def random_values(random, elements, size):
    return (random.standard_normal(elements) * size).astype(np.float32)


SEEN = collections.Counter()  # Of what the jobs are to have among them.


class Group:
    """A group's flat space in the model."""

    def __init__(self, message, parameters):
        h = message.hyper_parameters
        self.h = {field.name: getattr(h, field.name) for field in h.DESCRIPTOR.fields}
        self.wire, self.returned = message.wire_dtype, message.return_dtype
        self.parameters = parameters
        self.elements = message.flat_elements
        self.names, self.rule = planes_of(h), getattr(numpy_rules, jobs_pb.Rule.Name(h.rule).lower())
        self.planes = [np.zeros(self.elements, np.float32) for _ in self.names]
        for p in parameters:
            if "SUM" in self.names:
                self.planes[1][p.offset:p.offset + math.prod(p.shape)] = h.initial_accumulator_value
        SEEN[jobs_pb.Rule.Name(h.rule)] += 1
        self.counts = {p.name: 0 for p in parameters}

    def update(self, gradient, multiplier, h, kept):
        for p in self.parameters:
            size = math.prod(p.shape)
            if p.name in kept or size == 0:
                continue
            self.counts[p.name] += 1
            at = slice(p.offset, p.offset + size)
            new = self.rule({**h, "shape": p.shape}, self.counts[p.name], multiplier, gradient[at], *(plane[at] for plane in self.planes))
            for plane, values in zip(self.planes, new, strict=True):
                plane[at] = values


class Game:
    """One job: what it is, its ranks, and the model."""

    def __init__(self, channel, random, number):
        self.channel, self.random, self.name = channel, random, f"foreign{number}"
        self.world = int(random.integers(1, 4))
        self.speculate, self.shared = bool(random.integers(2)), bool(random.integers(2))
        self.policy = random.choice([jobs_pb.SKIP, jobs_pb.ZERO])
        self.jobs = jobs_pb2_grpc.JobServiceStub(channel)
        self.state = state_pb2_grpc.StateServiceStub(channel)
        self.job = self.jobs.CreateJob(jobs_pb.CreateJobRequest(job=self.describe()), timeout=30)
        trainable = [p for p in self.job.parameters if p.trainable]
        self.groups = [Group(group, [p for p in trainable if p.group == g])
                       for g, group in enumerate(self.job.groups)]
        self.ranks = [client.Rank(channel, f"jobs/{self.name}", rank, f"python-{number}-{rank}")
                      for rank in range(self.world)]

    def describe(self):
        random = self.random
        job = jobs_pb.Job(name=self.name, world_size=self.world, unused_policy=self.policy,
                     chunk_elements=BLOCK * int(random.choice([1, 2, 1024])),
                     on_abort=random.choice([jobs_pb.REDO_STEP, jobs_pb.SKIP_STEP]),
                     update_mode=jobs_pb.SPECULATE if self.speculate else jobs_pb.WAIT,
                     newton_schulz=random.choice([jobs_pb.BY_SERVICE, jobs_pb.BY_WORKERS]))
        for g in range(int(random.integers(1, 3))):
            h = jobs_pb.HyperParameters(lr=float(random.choice([1e-3, 0.1])), weight_decay=float(random.choice([0, 0.1])),
                                   **self.of_rule())
            if h.rule != jobs_pb.MUON:
                h.maximize = bool(random.integers(2))
            dtypes = [jobs_pb.BF16, jobs_pb.FP16, jobs_pb.FP32]
            job.groups.add(name=f"g{g}", hyper_parameters=h, wire_dtype=random.choice(dtypes),
                           return_dtype=random.choice(dtypes))
            flat = 0
            for p in range(int(random.integers(1, 4))):
                dimensions = 2 if h.rule == jobs_pb.MUON else int(random.integers(0, 3))
                shape = [int(n) for n in random.integers(1, 20, dimensions)]
                trainable = p == 0 or random.random() < 0.8
                job.parameters.add(name=f"g{g}.p{p}", shape=shape, group=g, trainable=trainable)
                flat += math.prod(shape) if trainable else 0
            # Blocks of the flat space, dealt to ranks.
            for begin in range(0, client.round_up(flat, BLOCK), BLOCK):
                job.partitions.add(rank=int(random.integers(self.world)), group=g, begin=begin, end=begin + BLOCK)
        return job

    def of_rule(self):
        """A rule, and the hyper-parameters that not all rules have."""
        random = self.random
        momentum, nesterov = float(random.choice([0, 0.9])), bool(random.integers(2))
        dampening = 0.0 if nesterov else float(random.choice([0, 0.3]))
        betas = dict(beta1=float(random.choice([0.9, 0.0])), beta2=0.99)
        options = {
            jobs_pb.ADAM: dict(betas, eps=1e-8, decoupled_weight_decay=bool(random.integers(2)),
                               bias_correction=bool(random.integers(2)), amsgrad=bool(random.integers(2))),
            jobs_pb.SGD: dict(momentum=momentum, dampening=dampening, nesterov=nesterov and momentum > 0),
            jobs_pb.LION: betas,
            jobs_pb.ADAGRAD: dict(eps=1e-10, lr_decay=float(random.choice([0, 0.1])),
                                  initial_accumulator_value=float(random.choice([0, 0.5]))),
            jobs_pb.SIGN_SGD: {},
            jobs_pb.MUON: dict(momentum=0.9, nesterov=nesterov, eps=1e-7, ns_steps=int(random.choice([1, 5])), ns_a=3.4445,
                               ns_b=-4.775, ns_c=2.0315, match_rms_adamw=bool(random.integers(2)))}
        rule = int(random.choice([jobs_pb.ADAM, *options]))
        return dict(options[rule], rule=rule)

    def padded(self, group, make):
        """An array of the group's flat space: `make(size)` for each parameter, zeros in the padding."""
        values = np.zeros(group.elements, np.float32)
        for p in group.parameters:
            size = math.prod(p.shape)
            values[p.offset:p.offset + size] = make(p, size)
        return values

    def start(self):
        for group in self.groups:
            group.planes[0] = self.padded(group, lambda p, size: random_values(self.random, size, 1))
        for rank in self.ranks:
            rank.attach(self.speculate, self.shared)
        begins_at = int(self.random.choice([0, 0, 1, 7, 100_000]))
        if begins_at > 0:
            self.go_on_from(begins_at)
        counts = {name: count for group in self.groups for name, count in group.counts.items()}

        def first(chunk):
            group = self.groups[chunk.group]
            planes = group.planes[:1] if begins_at == 0 else group.planes
            return np.concatenate([plane[chunk.begin:chunk.end] for plane in planes])

        for rank in self.ranks:
            rank.upload(first, begins_at, [counts.get(p.name, 0) for p in self.job.parameters])
        for rank in self.ranks:
            rank.open()
            expect(not self.shared or rank.shared is not None or not rank.chunks, "memory is shared")

    def go_on_from(self, step):
        """What another optimizer has made in so many steps."""
        for group in self.groups:
            for plane, name in enumerate(group.names[1:], 1):
                power = 2 if name in SQUARES else 1
                group.planes[plane] = self.padded(
                    group, lambda p, size, power=power: random_values(self.random, size, 0.1) ** power)
            group.counts = {name: int(self.random.integers(step + 1)) for name in group.counts}
        SEEN["moments"] += 1

    def send(self, micro_steps, spoil, divisor, overrides, expected=None):
        """Sends a step up to the seals; returns the gradients by group and the names of unused parameters."""
        random = self.random
        trainable = [p for group in self.groups for p in group.parameters if math.prod(p.shape) > 0]
        unused = {p.name for p in trainable if random.random() < 0.15}
        indices = {p.name: i for i, p in enumerate(self.job.parameters)}
        used = [indices[p.name] for p in trainable if p.name not in unused]
        sums = [None] * len(self.groups)
        for rank in self.ranks:
            rank.begin(loss_scale=8.0, divisors=[divisor] * len(self.groups), overrides=overrides,
                       expected_clipping=expected)
        guesses = random.random() < 0.3  # Nobody promises; most guess, rightly or not.
        for m in range(micro_steps):
            final = m + 1 == micro_steps
            for g, group in enumerate(self.groups):
                made = self.padded(group, lambda p, size: 0 if p.name in unused else random_values(random, size, 8))
                if spoil and final and g == 0 and group.parameters[0].name not in unused:
                    made[group.parameters[0].offset] = np.inf
                wire = encode(made, group.wire)
                sums[g] = decode(wire, group.wire) if m == 0 else sums[g] + decode(wire, group.wire)
                for rank in self.ranks:
                    for index, chunk in enumerate(rank.chunks):
                        if chunk.group == g:
                            part = wire[chunk.begin:chunk.end]
                            empty = not part.any() and not set(used) & set(self.parameters_in(chunk))
                            rank.gradient(index, None if empty else part, m, final and not guesses,
                                          guesses and random.random() < 0.7)
            for rank in self.ranks:
                rank.end_micro_step(m, used if unused else None)
        return sums, unused

    def parameters_in(self, chunk):
        return [i for i, p in enumerate(self.job.parameters)
                if p.trainable and p.group == chunk.group and p.offset < chunk.end
                and p.offset + math.prod(p.shape) > chunk.begin]

    def step(self):
        random = self.random
        micro_steps, spoil = int(random.integers(1, 4)), random.random() < 0.15
        divisor, lr = float(micro_steps), float(random.choice([1e-3, 1e-2]))
        overrides = {0: jobs_pb.HyperParameters(lr=lr)} if random.random() < 0.3 else {}
        if random.random() < 0.1:  # An attempt that is aborted leaves no trace, its overrides included.
            skips = self.job.on_abort == jobs_pb.SKIP_STEP
            self.send(micro_steps, False, divisor, {} if skips else {0: jobs_pb.HyperParameters(lr=77.0)})
            self.skip() if skips else self.abort()
            SEEN["given_up" if skips else "aborted"] += 1
        if random.random() < 0.2:  # Nor does one that is discarded, and nobody attaches again for it.
            self.send(micro_steps, random.random() < 0.5, 3 * divisor, {0: jobs_pb.HyperParameters(lr=78.0)})
            self.discard(micro_steps)
            SEEN["discarded"] += 1
        vote = self.any_vote()
        looks = [random.random() < 0.5 for _ in self.ranks]
        expected = vote.clipping if random.random() < 0.7 else None
        if random.random() < 0.2:  # The norm is seen, and the attempt discarded for it, by each rank in its time.
            self.send(micro_steps, False, divisor / 64, {0: jobs_pb.HyperParameters(lr=79.0)})
            for rank in self.ranks:
                rank.seal(micro_steps)
            norms = [rank.norm() for rank in self.ranks]
            expect(len({n.norm for n in norms}) == 1 and norms[0].norm >= 0, str(norms))
            for index in random.permutation(self.world):
                self.ranks[index].discard()
            SEEN["spikes"] += 1
        sums, unused = self.send(micro_steps, spoil, divisor, overrides, expected)
        for rank, look in zip(self.ranks, looks):
            rank.seal(micro_steps, None if look else vote)
        norms = [rank.norm() for rank, look in zip(self.ranks, looks) if look]
        if any(looks) and self.world > 1 and random.random() < 0.3:  # One votes otherwise, and all vote again.
            other, said = train_pb.Vote(abandon=not vote.abandon), False
            for rank, look in zip(self.ranks, looks):
                if look:
                    rank.vote(vote if said else other)
                    said = True
            if not all(looks) or sum(looks) > 1:
                for rank in self.ranks:
                    refused = rank.decision()
                    expect(isinstance(refused, train_pb.VoteRefused) and refused.reason == jobs_pb.VOTE_AGAIN, str(refused))
                SEEN["votes_refused"] += 1
            looks = [True] * self.world
        for rank, look in zip(self.ranks, looks):
            if look:
                rank.vote(vote)
        decisions = [rank.decision() for rank in self.ranks]
        decision = decisions[0]
        if not self.orthogonalize(decision):
            for rank in self.ranks:
                rank.await_commit()
        expect(all(d.applied == decision.applied for d in decisions), "ranks were told different things")
        if overrides:  # They stay in force, also after a step that is skipped.
            self.groups[0].h["lr"] = lr
        if 0 in vote.overrides:
            self.groups[0].h["lr"] = vote.overrides[0].lr
        finite = all(np.isfinite(s).all() for s in sums)
        SEEN.update(applied=decision.applied, skipped=not decision.applied, clipped=decision.clip_coefficient < 1,
                    unused=bool(unused), sums_of_micro_steps=micro_steps > 1)
        expect(all(n.norm == decision.norm or not finite for n in norms), "the norm that was told")
        expect(decision.applied == (finite and not vote.abandon), f"applied {decision.applied}: {decision.skip_reason}")
        if vote.abandon:
            expect("abandon" in decision.skip_reason, decision.skip_reason)
            return
        if not finite:
            expect(self.groups[0].parameters[0].name.split("/")[-1] in decision.skip_reason, decision.skip_reason)
            return
        scale = 8.0 * divisor
        norm = math.sqrt(math.fsum((float(x) / scale) ** 2 for s in sums for x in s))
        expect(math.isclose(decision.norm, norm, rel_tol=1e-12, abs_tol=1e-300), f"norm {decision.norm}, not {norm}")
        limit = vote.clipping.max_norm
        coefficient = min(1.0, limit / (decision.norm + 1e-6)) if limit > 0 else 1.0
        expect(decision.clip_coefficient == coefficient, "clip_coefficient")
        kept = unused if self.policy == jobs_pb.SKIP else set()
        multipliers = vote.clipping.multipliers or [1.0] * len(self.groups)
        for group, gradient, multiplier in zip(self.groups, sums, multipliers):
            group.update(gradient, np.float32(coefficient * multiplier / scale), group.h, kept)

    def orthogonalize(self, decision):
        """The second round, if the ranks make it. True: they know that the step is committed."""
        if not decision.applied or self.job.newton_schulz != jobs_pb.BY_WORKERS:
            return False
        read = [rank.directions() for rank in self.ranks]
        expect(len({r is None for r in read}) == 1, "some ranks have a second round, and some have none")
        if read[0] is None:
            return True
        spaces = [np.zeros(group.elements, "<u2") for group in self.groups]
        for rank, (values, directions) in zip(self.ranks, read):
            expect(len(values) == len(self.groups) and values == read[0][0], f"the step's values: {values}")
            for index, direction in directions.items():
                chunk = rank.chunks[index]
                spaces[chunk.group][chunk.begin:chunk.end] = direction
        for group, space, values in zip(self.groups, spaces, read[0][0]):
            h = {field.name: getattr(values, field.name) for field in values.DESCRIPTOR.fields}
            for p in group.parameters if values.rule == jobs_pb.MUON else []:
                at = slice(p.offset, p.offset + math.prod(p.shape))
                matrix = numpy_adam.from_bfloat16(space[at]).reshape(p.shape)
                space[at] = numpy_adam.to_bfloat16(numpy_rules.newton_schulz(h, matrix)).reshape(-1)
        for rank, (_, directions) in zip(self.ranks, read):
            rank.give_orthogonal({index: spaces[rank.chunks[index].group][rank.chunks[index].begin:rank.chunks[index].end]
                                  for index in directions})
        SEEN.update(by_workers=1)
        return False

    def any_vote(self):
        random = self.random
        vote = train_pb.Vote(abandon=random.random() < 0.1)
        if random.random() < 0.3:
            vote.clipping.max_norm = 0.5
        elif random.random() < 0.3:
            vote.clipping.multipliers.extend(random.choice([0.5, 1.0, 2.0], len(self.groups)))
        if random.random() < 0.2:
            vote.overrides[0].lr = 0.02
        if random.random() < 0.2:
            vote.trainer_state = b"voted"
        SEEN.update(abandoned=vote.abandon, multipliers=bool(vote.clipping.multipliers))
        return vote

    def skip(self):
        """An abort of a job that skips what cannot be kept: the streams go on."""
        for rank in self.ranks:
            rank.await_acknowledgement()  # So that the step has begun.
        self.jobs.AbortStep(jobs_pb.AbortStepRequest(name=f"jobs/{self.name}"), timeout=30)
        for rank in self.ranks:
            rank.end_micro_step(60)  # What comes late is nobody's.
            decision = rank.decision()
            expect(not decision.applied and "aborted" in decision.skip_reason, str(decision))
            rank.await_commit()

    def discard(self, micro_steps):
        """Each rank by itself; those after the first learn by their seals that they have to."""
        order = [self.ranks[index] for index in self.random.permutation(self.world)]
        order[0].discard()
        for rank in order[1:]:
            rank.seal(micro_steps)
            refused = rank.decision()
            expect(refused.reason == jobs_pb.DISCARD_AND_REDO and refused.attempt == rank.attempt, str(refused))
            rank.discard()

    def abort(self):
        for rank in self.ranks:
            rank.await_acknowledgement()  # So that the step has begun.
        self.jobs.AbortStep(jobs_pb.AbortStepRequest(name=f"jobs/{self.name}"), timeout=30)
        for rank in self.ranks:
            try:
                rank.close()
                raise AssertionError("an aborted step leaves no stream")
            except grpc.RpcError as error:
                expect(error.code() == grpc.StatusCode.ABORTED, str(error))
                expect(client.reason_of(error) == "OLDER_GENERATION", client.reason_of(error))
        for rank in self.ranks:
            rank.attach(self.speculate, self.shared)
        for rank in self.ranks:
            rank.open()

    def check(self):
        """Every plane of every parameter, and every rank's weights, bit for bit."""
        for group in self.groups:
            for p in group.parameters:
                at = slice(p.offset, p.offset + math.prod(p.shape))
                for name, plane in zip(group.names, group.planes):
                    request = state_pb.ReadStateRequest(name=p.name, plane=state_pb.Plane.Value(name))
                    data = b"".join(part.data for part in self.state.ReadState(request, timeout=30))
                    same = np.array_equal(np.frombuffer(data, "<u4"), bits(plane[at]))
                    expect(same, f"{name} of {p.name} differs")
        for rank in self.ranks:
            for index, chunk in enumerate(rank.chunks):
                group = self.groups[chunk.group]
                want = encode(group.planes[0][chunk.begin:chunk.end], group.returned)
                expect(np.array_equal(bits(rank.weights[index]), bits(want)), f"weights of chunk {index} differ")

    def play(self):
        self.start()
        for _ in range(int(self.random.integers(1, 4))):
            self.step()
        self.check()
        for rank in self.ranks:
            SEEN.update(guesses=rank.guesses, shared_memory=rank.shared is not None)
            rank.close()
        self.jobs.CloseJob(jobs_pb.CloseJobRequest(name=f"jobs/{self.name}"), timeout=30)


def main(ballastd, proto, jobs=200, seed=1):
    global client, jobs_pb, jobs_pb2_grpc, state_pb, state_pb2_grpc, train_pb
    np.seterr(all="ignore")  # Infinities are part of it.
    with tempfile.TemporaryDirectory() as folder:
        generate(pathlib.Path(proto), folder)
        import ballast_client as client
        from ballast.v1 import jobs_pb2 as jobs_pb, jobs_pb2_grpc, state_pb2 as state_pb, state_pb2_grpc
        from ballast.v1 import train_pb2 as train_pb
        service = processes.Service(ballastd, pathlib.Path(folder), "--log_level=error", "--memory_limit=1GiB",
                                    "--drain_seconds=1", listen=f"unix:{folder}/ballast.sock")
        try:
            # Descriptions of jobs and lists of them may have up to 32 MiB; the default is 4.
            options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            with grpc.insecure_channel(service.address, options) as channel:
                for number in range(jobs):
                    try:
                        Game(channel, np.random.default_rng([seed, number]), number).play()
                    except Exception:
                        print(f"job {number} of seed {seed}; ballastd printed:{processes.tail(service.log)}", file=sys.stderr)
                        raise
        finally:
            service.stop(signal.SIGTERM)
    absent = [what for what in {*SEEN, *jobs_pb.Rule.keys()[1:]} if SEEN[what] == 0]
    expect(jobs < 100 or not absent, f"no job had {absent}")
    print(f"{jobs} jobs, every bit as in the model: {dict(SEEN)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
