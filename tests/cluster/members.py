"""Services on hosts of their own, and trainings over several of them."""

import collections
import hashlib
import json
import math
import pathlib
import signal
import struct
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kill"))

import decisions  # noqa: E402
from processes import read, start  # noqa: E402
from runs import Run, Service, recoveries, result_of, tail  # noqa: E402

PORT = 7070
RANKS = 4


def state_hashes(checkpoint):
    """SHA-256 of each plane of each parameter, whichever files have it."""
    index = json.loads((checkpoint / "index.json").read_text())
    sizes = {parameter["name"]: 4 * math.prod(parameter["shape"]) for parameter in index["parameters"]}
    planes = {}
    for file in index["files"]:
        data = (checkpoint / file["name"]).read_bytes()
        length, = struct.unpack("<Q", data[:8])
        for name, tensor in json.loads(data[8:8 + length]).items():
            at = 8 + length + tensor["data_offsets"][0]
            whole = planes.setdefault((file["plane"], name), bytearray(sizes[name]))
            for begin, elements, count, stride in file.get("cut", {}).get(name, [[0, sizes[name] // 4, 1, 0]]):
                for piece in range(count):
                    to = 4 * (begin + piece * stride)
                    whole[to:to + 4 * elements] = data[at:at + 4 * elements]
                    at += 4 * elements
    return {f"{plane} {name}": hashlib.sha256(whole).hexdigest() for (plane, name), whole in planes.items()}


class Member(Service):
    """A ballastd on a host."""

    def __init__(self, folder, host, *flags):
        self.host = host
        super().__init__(folder, "--insecure", "--holder=parent", "--most-deaths=0", "--log-level=debug", *flags,
                         listen=f"{host.address}:{PORT}")

    def start(self, listen):
        """On its host; a later process of it, too."""
        self.process = start([*self.host.words, *self.words, f"--listen={listen}"], self.log)

    def save(self, job):
        """Returns the checkpoint's directory."""
        return pathlib.Path(json.loads(self.ask("save", job, "--json"))["directory"])

    def state_hashes(self, job):
        return state_hashes(self.save(job))

    def jobs(self):
        """Their names."""
        return [job["name"] for job in json.loads(self.ask("jobs", "--json"))["jobs"]]

    def memory_used(self):
        return json.loads(self.ask("jobs", "--json"))["memory_used_bytes"]


class Cluster:
    """Members, each on a host of its own. The first one leads the jobs that `run` starts. All share `saved`."""

    def __init__(self, folder, network, count, *, saved=None, flags=(), **wire):
        self.folder = folder
        self.saved = saved or pathlib.Path(tempfile.mkdtemp(prefix="saved-", dir=folder))
        self.network = network
        self.members = []
        try:
            for _ in range(count):
                self.members.append(Member(folder, network.add_host(**wire), f"--checkpoint-dir={self.saved}", *flags))
        except BaseException:
            self.stop()
            raise
        self.lead = self.members[0]

    def addresses(self, *numbers):
        """Of these members, or of all, as --service has them."""
        return ",".join(self.members[number].address for number in numbers or range(len(self.members)))

    def run(self, job, training, *, services=None, flags=()):
        return Run(self.folder, services or self.addresses(), job, training, flags=flags, ranks=RANKS)

    def train(self, job, training, **options):
        """The result of a training that nothing befalls."""
        run = self.run(job, training, **options)
        try:
            return self.end(run)
        finally:
            run.stop()

    def end(self, run):
        """Its result, once it has ended well. Then the job is closed, and no member has anything of it."""
        code = run.wait()
        if code != 0:
            raise AssertionError(f"ended with code {code}")
        if run.restarts() != 0:
            raise AssertionError(f"{run.restarts()} times all workers started again")
        result = result_of(run, self.lead)
        self.lead.ask("close", run.job, "--force")
        left = {member.address: names for member in self.members if (names := member.jobs())}
        if left:
            raise AssertionError(f"closed, but there are still jobs: {left}")
        self.check_decisions()
        return result

    def check_decisions(self):
        """Returns their number."""
        return decisions.check(read(member.log) for member in self.members)

    def recoveries(self):
        """Of all members, by what their processes had died in."""
        return sum((recoveries(read(member.log)) for member in self.members), collections.Counter())

    def story(self, run):
        """For a failure: the last words of everybody."""
        return run.story() + "".join(f"\n  {member.address} said:{tail(member.log, 40)}" for member in self.members)

    def stop(self):
        for member in self.members:
            member.stop(signal.SIGKILL)
            self.network.remove_host(member.host)
