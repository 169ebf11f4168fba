"""Ranks of torch.distributed as processes: forks of one that has torch already, since importing it takes longer than
what they do."""

import faulthandler
import importlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
for _folder in (ROOT / "client/python", ROOT / "tests/support", pathlib.Path(__file__).resolve().parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
_SECONDS = 300
LONGEST = 1000.0  # Seconds, as time limit of a wait that should not be: the test ends it long before.


def kill_service(pid):
    """SIGKILL to ballastd. Returns when the process that served behind it has ended, too, which is a little later."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(_lives(child) for child in children):
        if time.monotonic() > deadline:
            raise AssertionError(f"processes {children} outlive {pid}")
        time.sleep(0.002)


def _lives(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run_ranks(module, world_size, cases, may_die=()):
    """What module.function(rank, world_size, **options) returns on each rank, through JSON, for each (function,
    options) of the cases, one after the other: a list by case of lists by rank. AssertionError with what the rank that
    failed first said, or where those stood that did not end; the module is imported by the ranks alone. Of the ranks
    that may die there is None."""
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Of the process that the ranks are forks of.
    context.set_forkserver_preload([module])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(module, rank, world_size, cases, folder))
                 for rank in range(world_size)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + _SECONDS
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0))
        late = [process for process in ranks if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        # A rank fails where another has, so the first one is the culprit.
        errors = sorted(pathlib.Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        said = [f"rank {path.stem} of {world_size}:\n{path.read_text()}" for path in errors[:1]]
        said += [f"rank {rank} of {world_size} did not end in {_SECONDS} s:\n"
                 + pathlib.Path(folder, f"{rank}.stacks").read_text()
                 for rank, process in enumerate(ranks) if process in late]
        if said:
            raise AssertionError("\n".join(said))
        results = []
        for rank, process in enumerate(ranks):
            if rank in may_die:
                results.append([None] * len(cases))
                continue
            if process.exitcode:
                raise AssertionError(f"rank {rank} of {world_size} ended with {process.exitcode}")
            results.append(json.loads(pathlib.Path(folder, f"{rank}.json").read_text()))
        return [list(of_case) for of_case in zip(*results)]


class RanksTest(unittest.TestCase):
    """Tests of which each has jobs of its own on a service. MODULE has the functions of the ranks."""

    MODULE: str

    @classmethod
    def setUpClass(cls):
        import ballast  # Not by the ranks, which import their module alone.
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def ranks(self, world_size, *cases):
        return run_ranks(self.MODULE, world_size, [
            (function, {"service": self.service.address, "job": f"{self.id().split('.')[-1]}-{world_size}-{number}",
                        **options})
            for number, (function, options) in enumerate(cases)])


def _rank(module, rank, world_size, cases, folder):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stacks = open(f"{folder}/{rank}.stacks", "w")
    faulthandler.dump_traceback_later(_SECONDS - 30, file=stacks)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
        results = []
        for function, options in cases:
            results.append(getattr(importlib.import_module(module), function)(rank, world_size, **options))
        pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(results))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pathlib.Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise
