#!/usr/bin/env python3
"""Connections that are cut and delayed at random instants change no bit, and the trainers notice
nothing: no worker is started again, and the job's generation stays.

    cut_test.py [--runs N] [--seed S]
"""

import random
import sys

from cutting_proxy import CuttingProxy
from kill_test import TRAINING, run_all
from processes import Run, difference, result_of

CUTS = 8  # At most, of both workers' connections together.


def one_run(folder, service, undisturbed, name, seed):
    proxy = CuttingProxy(service.address, seed, CUTS)
    try:
        run = Run(folder, proxy.address, name, TRAINING)
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
            if job["generation"] != 1 or job["coverage_complete_steps"] != TRAINING.steps:
                raise AssertionError(f"generation {job['generation']}, coverage complete in "
                                     f"{job['coverage_complete_steps']} steps")
            if not proxy.done:
                raise AssertionError("nothing was cut")
            service.ask("close", name)
            cuts = ", ".join(f"{count} x {how}" for how, count in sorted(proxy.done.items()))
            return f"cut {cuts}; same bits"
        except Exception as error:
            raise AssertionError(f"{error}\n  cut: {dict(proxy.done)}{run.story()}") from error
        finally:
            run.stop()
    finally:
        proxy.stop()


if __name__ == "__main__":
    sys.exit(run_all(__doc__, one_run, runs=24))
