#!/usr/bin/env python3
"""Connections that are cut and delayed at random instants change no bit, and the trainers notice
nothing: no worker is started again, and the job's generation stays.

    cut_test.py [--runs N] [--seed S]
"""

import random
import sys

from cutting_proxy import CuttingProxy
from kill_test import TRAINING, drawn_anew, run_all
from runs import Mode, Run, difference, result_of

CUTS = 8  # At most, of both workers' connections together.
# Before a cut, at most: a few steps' worth, of which shared memory leaves only small messages.
MOST_BYTES = {"never": 150_000, "auto": 4_000}


def one_draw(folder, service, undisturbed, name, seed):
    """None if the run was over before anything was cut."""
    mode = Mode.draw(random.Random(f"{seed}/mode"))
    proxy = CuttingProxy(service.address, seed, CUTS, most_bytes=MOST_BYTES[mode.shared_memory])
    try:
        run = Run(folder, proxy.address, name, TRAINING, flags=mode.flags())
        try:
            run.await_step(random.Random(seed).randrange(1, 5))
            proxy.enable()
            code = run.wait()
            if code != 0:
                raise AssertionError(f"ended with code {code}")
            problem = difference(result_of(run, service), undisturbed)
            if problem:
                raise AssertionError(problem)
            job = service.job(name)
            mode.check(run, job)
            if job["generation"] != {"epoch": 1, "count": 1} or job["coverage_complete_steps"] != TRAINING.steps:
                raise AssertionError(f"generation {job['generation']}, coverage complete in "
                                     f"{job['coverage_complete_steps']} steps")
            service.ask("close", name, "--force")
            if not proxy.done:
                return None
            cuts = ", ".join(f"{count} x {how}" for how, count in sorted(proxy.done.items()))
            return f"{mode}, cut {cuts}; same bits"
        except Exception as error:
            raise AssertionError(f"{error}\n  cut: {dict(proxy.done)}{run.story()}") from error
        finally:
            run.stop()
    finally:
        proxy.stop()


if __name__ == "__main__":
    sys.exit(run_all(__doc__, drawn_anew(one_draw), runs=24))
