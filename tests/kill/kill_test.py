#!/usr/bin/env python3
"""Workers that are killed at random instants and started again end with the bits of a run that nothing
befell: the weights, the service's whole state, the losses and the recorded decisions.

    kill_test.py [--runs N] [--seed S]

prints one line a run. Only the instants depend on the seed, and what they hit on the machine's mood.
"""

import argparse
import concurrent.futures
import pathlib
import random
import sys
import tempfile
import time
import traceback

from runs import Mode, Run, Service, Training, await_, difference, result_of, undisturbed_result

TRAINING = Training(rule="muon", state="8bit")
AT_ONCE = 2
LONGEST_DELAY = 0.03  # Seconds after a step; several steps long.
LONGEST_START = 0.3   # Seconds from the start of the processes to their first step, and more.

kills_done = []   # By run: how many workers were killed.
generations = []  # Of the jobs, at the end of their runs.


def plan(random_source):
    """When to kill whom: (step to await, delay in seconds, rank), one to three times."""
    kills = []
    for _ in range(random_source.randint(1, 3)):
        # One in six while the workers find each other and the job, or read its weights.
        step = 0 if random_source.random() < 1 / 6 else random_source.randrange(1, TRAINING.steps)
        delay = random_source.uniform(0, LONGEST_DELAY if step > 0 else LONGEST_START)
        kills.append((step, delay, random_source.randrange(2)))
    return sorted(kills)


def disturb(run, kills):
    """Kills as planned; says at which steps somebody was there to be killed."""
    hit = []
    for step, delay, rank in kills:
        restart = len(hit)
        run.pid(rank, restart)
        run.await_step(step)
        time.sleep(delay)
        if not run.kill(rank, restart):
            break  # The run was over.
        hit.append(f"rank {rank} after step {run.step()}")
        await_("the end of the killed start",
               lambda: run.restarts() == len(hit) or run.process.poll() is not None)
    return hit


def drawn_anew(one_draw):
    """The run of which it is a draw: with others where it returns None, because the run was over before anything
    befell it."""
    def one_run(folder, service, undisturbed, name, seed):
        for draw in range(20):
            story = one_draw(folder, service, undisturbed, f"{name}-{draw}", f"{seed}/{draw}")
            if story:
                return story
        raise AssertionError("20 runs were over before anything could befall them")
    return one_run


def one_draw(folder, service, undisturbed, name, seed):
    """None if the run was over before anybody could be killed."""
    kills = plan(random.Random(seed))
    mode = Mode.draw(random.Random(f"{seed}/mode"))
    run = Run(folder, service.address, name, TRAINING, max_restarts=len(kills), flags=mode.flags())
    try:
        hit = disturb(run, kills)
        code = run.wait()
        if code != 0:
            raise AssertionError(f"ended with code {code}")
        # A worker that was alive when it was killed has not exited with 0, so all were started again.
        if run.restarts() != len(hit):
            raise AssertionError(f"{len(hit)} were killed, but {run.restarts()} times all started again")
        problem = difference(result_of(run, service), undisturbed, deaths=len(hit))
        if problem:
            raise AssertionError(problem)
        job = service.job(name)
        mode.check(run, job)
        if job["coverage_complete_steps"] != TRAINING.steps:
            raise AssertionError(f"coverage complete in {job['coverage_complete_steps']} steps")
        service.ask("close", name, "--force")
        if not hit:
            return None
        kills_done.append(len(hit))
        generations.append(job["generation"]["count"])
        return f"{mode}, killed {', '.join(hit)}; generation {job['generation']}; same bits"
    except Exception as error:
        raise AssertionError(f"{error}\n  to be killed (step, delay, rank): {kills}{run.story()}") from error
    finally:
        run.stop()


def run_all(what, one, runs):
    """Runs `one(folder, service, undisturbed, name, seed)` as often as the command line says, or `runs`
    times; it returns what it did, or raises. One line a run; the exit code."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    flags = parser.parse_args()
    print(f"seed {flags.seed}", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="ballast-kill-") as name:
        folder = pathlib.Path(name)
        service = Service(folder)
        try:
            undisturbed = undisturbed_result(folder, service, "undisturbed", TRAINING)
            problem = difference(undisturbed_result(folder, service, "again", TRAINING), undisturbed)
            if problem:
                print(f"FAILED: two undisturbed runs differ: {problem}")
                return 1
            counts = service.job("undisturbed")["speculation"]
            if counts["published_chunks"] == 0 or counts["redone_chunks"] == 0:
                print(f"FAILED: the undisturbed run is to make provisional updates that hold and some that do not: {counts}")
                return 1
            with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
                started = [pool.submit(one, folder, service, undisturbed, f"run-{i}", f"{flags.seed}/{i}")
                           for i in range(flags.runs)]
                for i, run in enumerate(started):
                    try:
                        print(f"run {i}: {run.result()}", flush=True)
                    except Exception as error:
                        failures += 1
                        story = error if isinstance(error, AssertionError) else traceback.format_exc()
                        print(f"run {i} of seed {flags.seed} FAILED: {story}", flush=True)
        finally:
            service.stop()
    print(f"{flags.runs - failures} of {flags.runs} runs ended with the bits of the undisturbed one")
    return 1 if failures else 0


def main():
    code = run_all(__doc__, drawn_anew(one_draw), runs=50)
    # Bits alone do not tell: a step that is done again has the gradients that it had before.
    kills, raised = sum(kills_done), sum(generations) - len(generations)
    print(f"{kills} workers were killed; {raised} kills raised the generation: they came in mid-step")
    if code == 0 and len(generations) >= 10 and 4 * raised < kills:
        print("FAILED: too few kills came in mid-step")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
