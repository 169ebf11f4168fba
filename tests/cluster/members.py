"""Services on hosts of their own, and trainings over several of them."""

import collections
import json
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kill"))

from processes import read, start  # noqa: E402
from runs import Run, Service, recoveries, result_of, tail  # noqa: E402

PORT = 7070
RANKS = 4
SAME = ("weights", "losses", "decisions")  # The state of a job over members cannot be saved.


class Member(Service):
    """A ballastd on a host."""

    def __init__(self, folder, host, *flags):
        self.host = host
        super().__init__(folder, "--insecure", "--holder=parent", "--most-deaths=0", "--log-level=debug", *flags,
                         listen=f"{host.address}:{PORT}")

    def start(self, listen):
        """On its host; a later process of it, too."""
        self.process = start([*self.host.words, *self.words, f"--listen={listen}"], self.log)

    def jobs(self):
        """Their names."""
        return [job["name"] for job in json.loads(self.ask("jobs", "--json"))["jobs"]]

    def memory_used(self):
        return json.loads(self.ask("jobs", "--json"))["memory_used_bytes"]


class Cluster:
    """Members, each on a host of its own. The first one leads the jobs that `run` starts."""

    def __init__(self, folder, network, count, *, flags=(), **wire):
        self.folder = folder
        self.network = network
        self.members = []
        try:
            for _ in range(count):
                self.members.append(Member(folder, network.add_host(**wire), *flags))
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
        result = result_of(run, self.lead, has_state=False)
        self.lead.ask("close", run.job, "--force")
        left = {member.address: names for member in self.members if (names := member.jobs())}
        if left:
            raise AssertionError(f"closed, but there are still jobs: {left}")
        return result

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
