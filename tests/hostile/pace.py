"""How fast the honest job is while it is attacked.

The job thinks for 75 ms in each step, as a backward does, and has enough state that the service's work is a visible
part of the step; alone it and the service have less than a third of the machine. Attackers have what of the processors
no other process wants (SCHED_IDLE; at nice 19 two that only burn took a fifth): they attack at the full rate in the idle
time, and take no core from the honest job, as attackers elsewhere would not. With --flat-out they compete for the
processors like any process: the worst case.

    pace     steps a second while the family attacks, again and again until that has taken ten seconds, divided by the
             mean of the equally long times before and after
    control  the same with processes that only burn in the place of the attackers: as many as these had processors
    service  seconds of processor a second that the service had, attacked and alone
"""

import contextlib
import math
import os
import pathlib
import sys
import time

from processes import start, stop

HONEST = ("--pause=0.075", "--chunks=32", "--chunk=262144")
LEAST_SECONDS = 10
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid):
    words = pathlib.Path("/proc", str(pid), "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def yield_processors(yields):
    """The attackers, which are this process's threads. A thread that begins is as the one that began it."""
    for thread in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE if yields else os.SCHED_OTHER, os.sched_param(0))


class Window:
    """A time in which the honest job was watched."""

    def __init__(self, suite, seconds, action=None):
        pids = suite.service.process.pid, suite.honest.process.pid, os.getpid()
        begun = [processor_seconds(pid) for pid in pids]
        begin = time.monotonic()
        if action is not None:
            action()
        time.sleep(max(begin + seconds - time.monotonic(), 0))
        end = time.monotonic()
        self.seconds = end - begin
        self.service, self.honest, self.attackers = (
            (processor_seconds(pid) - before) / self.seconds for pid, before in zip(pids, begun))
        self.steps = sum(begin <= at < end for at in suite.honest.steps()[1]) / self.seconds


def attack_for(suite, name, seconds):
    end = time.monotonic() + seconds
    while True:
        for what, attack in suite.attacks_of(name):
            suite.attacked += 1
            suite.attack(name, what, attack)
        if time.monotonic() >= end:
            return


def burn(count, seconds):
    burners = [start([sys.executable, "-c", "while True: pass"], os.devnull) for _ in range(count)]
    for burner in burners:
        os.sched_setscheduler(burner.pid, os.SCHED_IDLE, os.sched_param(0))
    time.sleep(seconds)
    for burner in burners:
        stop(burner)


def print_header():
    print("| family | seconds | pace | control | steps/s alone | service | service alone | attackers | "
          "of the machine, alone |\n|---|---|---|---|---|---|---|---|---|", flush=True)


def measure(suite, name, flat_out):
    """Prints a row. How long the family takes is known when it has been played once. What has only idle time takes
    without an end where other processes leave none: so what is awaited is said."""
    begin = time.monotonic()
    attack_for(suite, name, 0)
    once = time.monotonic() - begin
    seconds = once * math.ceil(LEAST_SECONDS / once)
    print(f"{name}: played once in {once:.0f} s; its row takes {3 * seconds + 3 * LEAST_SECONDS:.0f} s more, and longer "
          "where other processes want the processors", file=sys.stderr, flush=True)
    suite.honest.await_progress(f"after {name}")
    suite.await_memory(name)

    before = Window(suite, seconds)
    yield_processors(not flat_out)
    try:
        attacked = Window(suite, 0, lambda: attack_for(suite, name, LEAST_SECONDS))
    finally:
        yield_processors(False)
    after = Window(suite, seconds)
    suite.honest.await_progress(f"after {name}")
    suite.await_memory(name)
    burners = max(math.ceil(attacked.attackers), 1)
    control_before = Window(suite, LEAST_SECONDS)
    control = Window(suite, LEAST_SECONDS, lambda: burn(burners, LEAST_SECONDS))
    control_after = Window(suite, LEAST_SECONDS)

    def of_alone(window, *alone):
        return window.steps / max(sum(each.steps for each in alone) / len(alone), 1e-9)

    alone = (before.service + before.honest + after.service + after.honest) / 2 / os.cpu_count()
    print(f"| {name} | {attacked.seconds:.0f} | {of_alone(attacked, before, after):.2f} | "
          f"{of_alone(control, control_before, control_after):.2f} ({burners}) | {(before.steps + after.steps) / 2:.1f} | "
          f"{attacked.service:.2f} | {(before.service + after.service) / 2:.2f} | {attacked.attackers:.2f} | {alone:.0%} |",
          flush=True)
