#!/usr/bin/env python3
"""A service whose process is killed at random instants, again and again, while workers train: they notice
a warning line, none is started again, and all ends with the bits of a run that nothing befell. In some runs all
its processes are, the parent too, and what is left is the directory of --state-dir.

    service_test.py [--runs N] [--seed S]

prints one line a run. Only the instants depend on the seed, and what they hit on the machine's mood.
"""

import collections
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sys
import tempfile
import time

import runs
from kill_test import TRAINING, run_all
from processes import HeldPort, await_, state_of
from runs import TRANSPORTS, Mode, Run, Service, child_of, difference, read, recoveries, result_of, served

LONGEST_LIFE = 0.25   # Seconds from an answer of the service to its next death.
LONGEST_DELAY = 0.01  # Or from a step's end, where no parent keeps the socket and workers take longer to come back.
MOST_KILLS = 12       # In a run. Then it may end.

kills_done = []
recovered = collections.Counter()  # By what the process before had died in.
back_after = []  # Seconds from each death to the next process that has taken over.


def kill_child(service):
    """How many processes had served by then; None if there was none to be killed. Stopped first, it serves no more
    between the count and its end."""
    pid = child_of(service)
    if pid == 0:
        return None
    with contextlib.suppress(ProcessLookupError):  # Its parent has found it dead.
        os.kill(pid, signal.SIGSTOP)
        await_("its stop", lambda: state_of(pid) in ("T", "Z", "X", ""))
        if state_of(pid) == "T":
            count = served(service)
            os.kill(pid, signal.SIGKILL)
            return count
    return None


def kill_all(service):
    """The parent, with which its child ends, too; then a runtime starts the service again. Returns as kill_child."""
    service.stop(signal.SIGKILL)
    count = served(service)
    service.start(service.address)
    return count


def kill_until_over(run, service, in_directory, seed):
    """Kills the service until the workers have ended; how many times. It then serves again."""
    kill = kill_all if in_directory else kill_child
    draw = random.Random(seed)
    kills = 0
    before = -1  # How many had served before the last kill.
    most = MOST_KILLS // 2 if in_directory else MOST_KILLS
    while run.process.poll() is None and kills < most:
        if in_directory and kills > 0:
            step = run.step()
            await_("another step", lambda: run.step() > step or run.process.poll() is not None)
            time.sleep(draw.uniform(0, LONGEST_DELAY))
        else:
            time.sleep(draw.uniform(0, LONGEST_LIFE))
        count = None if run.process.poll() is not None else kill(service)
        if count is None:
            continue
        begin = time.monotonic()
        kills += 1
        before = count
        if draw.random() >= 0.2:  # Else the next death may come while it takes over what this one left.
            await_("a process that serves", lambda: served(service) > count, service.process)
            back_after.append(time.monotonic() - begin)
    await_("the last process", lambda: served(service) > before, service.process)
    return kills


def one_run(folder, _, undisturbed, name, seed):
    draw = random.Random(seed)
    mode = Mode.draw(draw)
    # In every third run the service dies with all of its processes; once with shared memory, which
    # then is gone, once without.
    number = int(name.split("-")[1])
    in_directory = number % 3 == 2
    flags = ["--holder=parent", "--most-deaths=0"]
    port = HeldPort()
    if in_directory:
        state = tempfile.mkdtemp(prefix="ballast-state-", dir="/dev/shm")
        mode = dataclasses.replace(mode, shared_memory=list(TRANSPORTS)[number // 3 % 2])
        flags = [f"--state-dir={state}", f"--holder={draw.choice(['parent', 'none'])}"]
    service = Service(folder, *flags, "--log-level=debug", listen=port.address)
    run = Run(folder, service.address, name, TRAINING, flags=mode.flags())
    try:
        kills = kill_until_over(run, service, in_directory, f"{seed}/kills")
        code = run.wait()
        if code != 0:
            raise AssertionError(f"ended with code {code}")
        if run.restarts() != 0:
            raise AssertionError(f"{run.restarts()} times all workers started again")
        problem = difference(result_of(run, service), undisturbed)
        if problem:
            raise AssertionError(problem)
        job = service.job(name)
        mode.check(run, job)
        if job["coverage_complete_steps"] != TRAINING.steps:
            raise AssertionError(f"coverage complete in {job['coverage_complete_steps']} steps")
        story = read(service.log)
        kills_done.append(kills)
        found = recoveries(story)
        recovered.update(found)
        what = f"all of the service ({flags[1]})" if in_directory else "the service"
        return (f"{mode}, {what} killed {kills} times: {found['update']} decided steps rolled "
                f"forward, {found['second round']} second rounds gone on with, {found['gradients']} undecided kept, "
                f"{found['done again']} done again; same bits")
    except Exception as error:
        raise AssertionError(f"{error}\n  the service said:{runs.tail(service.log, 30)}{run.story()}") from error
    finally:
        run.stop()
        service.stop(signal.SIGKILL)
        port.close()
        if in_directory:
            shutil.rmtree(state)


if __name__ == "__main__":
    code = run_all(__doc__, one_run, runs=8)
    if back_after:
        print(f"{sum(kills_done)} kills; back after {sorted(back_after)[len(back_after) // 2]:.3f} s (median), "
              f"{max(back_after):.3f} s at most")
    if code == 0 and sum(kills_done) == 0:
        print("FAILED: nobody was there to be killed")
        code = 1
    sys.exit(code)
