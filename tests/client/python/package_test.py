#!/usr/bin/env python3
"""The package `ballast` without PyTorch: a service as a child, sessions on arrays, state as arrays."""

import ctypes
import gc
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest
import weakref
from unittest import mock

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/support")]

import ballast  # noqa: E402
import processes  # noqa: E402
from ballast.service import tls_files  # noqa: E402
from certificates import Authority, Guarded  # noqa: E402
from messages import refused  # noqa: E402

SHAPES = {"w": (30, 20), "b": (7,), "scalar": ()}


def job(name, world_size=1, **more):
    groups = [ballast.Group("all", ballast.HyperParameters(lr=0.01, weight_decay=0.1))]
    parameters = [ballast.Parameter(key, shape) for key, shape in SHAPES.items()]
    return ballast.Job(name, groups, parameters, world_size=world_size, **more)


class Rank:
    """Three arrays, whose gradient is that of (w - 1)^2 / 2."""

    def __init__(self, service, name, rank=0, world_size=1, options=None, **more):
        self.arrays, self.max_norm = [np.full(shape, 0.5, np.float32) for shape in SHAPES.values()], 0.0
        self.session = ballast.Session(service, job(name, world_size, **more), self.addresses(), rank=rank,
                                       **(options or {}))

    def addresses(self):
        return [array.ctypes.data for array in self.arrays]

    def start(self):
        if self.session.awaiting_weights:
            self.session.upload_weights(self.addresses())
        self.session.read_weights()

    def step(self, **settings):
        self.session.begin_step(**settings)
        gradients = [np.asarray(array - 1, np.float32) for array in self.arrays]
        self.session.push_gradients([gradient.ctypes.data for gradient in gradients])
        decision = self.session.seal_and_vote(max_norm=self.max_norm)
        self.session.receive_weights()
        return decision


def adamw(steps):
    """A weight of the ranks above after these steps, in double and from the definition."""
    weight, first, second = 0.5, 0.0, 0.0
    for step in range(1, steps + 1):
        gradient = weight - 1
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient ** 2
        weight *= 1 - 0.01 * 0.1
        weight -= 0.01 * first / (1 - 0.9 ** step) / ((second / (1 - 0.999 ** step)) ** 0.5 + 1e-8)
    return weight


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def test_without_a_torch_that_it_can_use_it_says_what_to_install(self):
        for torch in (None, types.SimpleNamespace(__version__="2.5.1+cpu")):
            with mock.patch.dict(sys.modules, torch=torch), refused(self, ImportError):
                importlib.import_module("ballast.torch")

    def rank(self, name, **more):
        rank = Rank(self.service.address, name, **more)
        self.addCleanup(rank.session.close)
        return rank

    def test_trains_and_shows_its_state(self):
        rank = self.rank("trains")
        rank.start()
        for step in range(1, 51):
            decision = rank.step()
            self.assertEqual((decision.step, decision.applied, decision.skip_reason), (step, True, ""))
            self.assertGreater(decision.norm, 0)
        for array in rank.arrays:
            np.testing.assert_allclose(array, adamw(50), rtol=0, atol=2e-6)
        client = ballast.connect(self.service.address)
        found = {entry["name"]: entry for entry in client.jobs()}["trains"]
        self.assertEqual(found["committed_step"], 50)
        self.assertEqual(found["uid"], rank.session.job_uid)
        for name, array in zip(SHAPES, rank.arrays):
            state = client.state("trains", name)
            self.assertEqual(state.shape, array.shape)
            np.testing.assert_array_equal(state, array)
        self.assertGreater(client.state("trains", "w", "exp_avg_sq").min(), 0)
        self.assertIn("w", str(client.summary("trains", "w")))
        self.assertEqual(client.job("trains")["committed_step"], 50)

    def test_a_plane_is_summarised_and_a_norm_names_what_was_unused(self):
        rank = self.rank("summaries")
        rank.start()
        rank.step()
        summary = ballast.connect(self.service.address).summary("summaries", "w")
        self.assertEqual((summary["step"], summary["update_count"]), (1, 1))
        self.assertEqual([plane["plane"] for plane in summary["planes"]], ["MASTER", "EXP_AVG", "EXP_AVG_SQ"])
        weights, master = rank.arrays[0].astype(np.float64), summary["planes"][0]
        self.assertAlmostEqual(master["norm"], np.linalg.norm(weights), places=9)
        self.assertEqual((master["min"], master["max"]), (weights.min(), weights.max()))
        self.assertEqual((sum(master["magnitude_histogram"]), master["zeros"]), (600, 0))
        rank.session.begin_step()
        rank.session.push_gradients([rank.arrays[0].ctypes.data, None, rank.arrays[2].ctypes.data])
        norm = rank.session.seal()
        self.assertEqual((norm.unused_parameters, norm.unused_names, norm.non_finite), (1, ("b",), ""))
        self.assertTrue(rank.session.vote().applied)
        rank.session.receive_weights()

    def test_a_step_that_could_not_be_kept_is_counted_as_such(self):
        rank = self.rank("lost", on_abort="skip")
        rank.start()
        rank.step()
        client = ballast.connect(self.service.address)
        rank.session.begin_step()
        processes.await_("the step's begin", lambda: client.job("lost")["ranks"][0]["begun"])
        client._change("JobService/AbortStep", name="jobs/lost")
        rank.session.push_gradients([array.ctypes.data for array in rank.arrays])
        self.assertIn("could not be kept", rank.session.seal_and_vote().skip_reason)
        rank.session.receive_weights()
        self.assertEqual(rank.step().step, 3)
        job = client.job("lost")
        self.assertEqual([job[count] for count in ("applied_steps", "skipped_steps", "not_kept_steps",
                                                   "coverage_complete_steps")], [2, 1, 1, 2])

    def test_settings_of_a_step_count_from_that_step_on(self):
        rank = self.rank("settings")
        rank.max_norm = 1e-3
        rank.start()
        before = [array.copy() for array in rank.arrays]
        frozen = [ballast.HyperParameters(lr=0.0, weight_decay=0.0)]
        decision = rank.step(hyper_parameters=frozen, loss_scale=2.0, divisors=[4.0], trainer_state=b"a\0b")
        for array, old in zip(rank.arrays, before):
            np.testing.assert_array_equal(array, old)
        elements = sum(array.size for array in rank.arrays)
        self.assertAlmostEqual(decision.norm, 0.5 * elements ** 0.5 / 8, places=5)
        self.assertLess(decision.clip_coefficient, 0.01)
        again = self.rank("settings")
        self.assertEqual(again.session.trainer_state, b"a\0b")
        self.assertEqual(again.session.committed_step, 1)

    def test_two_ranks_share_the_work(self):
        results, errors = {}, []

        def run(number):
            try:
                rank = Rank(self.service.address, "two", number, 2)
                rank.start()
                for _ in range(3):
                    rank.step()
                results[number] = rank.arrays
                rank.session.close()
            except Exception as error:  # Told by the main thread.
                errors.append(error)

        threads = [threading.Thread(target=run, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(errors, [])
        # Each element was written on exactly one of them: the others kept 0.5.
        moved = [np.concatenate([array.ravel() != 0.5 for array in results[number]]) for number in range(2)]
        self.assertTrue((moved[0] ^ moved[1]).all())

    def test_a_rank_that_owns_nothing_begins_at_the_step_of_the_others(self):
        tiny = ballast.Job("tiny", [ballast.Group("all", ballast.HyperParameters(lr=0.01))],
                           [ballast.Parameter("w", (7,))], world_size=2)
        arrays = [np.full(7, 0.5, np.float32) for _ in range(2)]
        ranks = []
        for rank, array in enumerate(arrays):
            ranks.append(ballast.Session(self.service.address, tiny, [array.ctypes.data], rank=rank))
            self.addCleanup(ranks[-1].close)
        self.assertEqual([session.owned_elements() for session in ranks], [[7], [0]])
        client = ballast.connect(self.service.address)

        def write(parameter, plane, offset, elements, address):
            ctypes.memmove(address, arrays[0].ctypes.data + 4 * offset, 4 * elements)

        for step, session in ((3, ranks[1]), (5, ranks[0])):  # That of the first of them goes with its weights.
            self.assertEqual((client.job("tiny")["phase"], client.job("tiny")["committed_step"]),
                             ("AWAITING_WEIGHTS", 0))
            session.upload_by(write, step=step, update_counts=[step])
        self.assertEqual(client.job("tiny")["committed_step"], 5)
        for session in reversed(ranks):
            session.read_weights()
            self.assertEqual(session.committed_step, 5)
        gradient = np.ones(7, np.float32)

        def step(session):
            session.begin_step()
            session.push_gradients([gradient.ctypes.data])
            decided.append(session.seal_and_vote().step)
            session.receive_weights()

        decided = []
        other = threading.Thread(target=step, args=[ranks[1]])
        other.start()
        step(ranks[0])
        other.join()
        self.assertEqual(decided, [6, 6])

    def test_errors_are_pythons_kinds_with_one_line(self):
        rank = self.rank("errors")
        rank.start()
        client = ballast.connect(self.service.address)
        for pythons, kind, reason, act in (
                (ValueError, ballast.InvalidArgumentError, "",
                 lambda: ballast.Session(self.service.address, job("a/b"), rank.addresses())),
                (ValueError, ValueError, "", lambda: self.rank("errors", unused_policy="perhaps")),
                (ValueError, ValueError, "", lambda: ballast.Session(self.service.address, job("x"), [1, 2])),
                (RuntimeError, ballast.FailedPreconditionError, "OTHER_DESCRIPTION",
                 lambda: self.rank("errors", on_abort="skip")),
                (RuntimeError, ballast.FailedPreconditionError, "", lambda: rank.session.seal()),
                (ValueError, ValueError, "", lambda: rank.session.begin_step(divisors=[1.0, 2.0])),
                (ConnectionError, ballast.UnavailableError, "", lambda: ballast.connect("unix:/no/such", timeout=1)),
                (ConnectionError, ballast.UnavailableError, "",
                 lambda: Rank("unix:/no/such", "x", options=dict(join_timeout=0.2))),
                (ValueError, ballast.InvalidArgumentError, "", lambda: Rank("a:7070,b:7070", "x")),
                (ValueError, ballast.InvalidArgumentError, "", lambda: Rank(["a:7070", "a:7070"], "x", world_size=2)),
                (TypeError, TypeError, "", lambda: Rank(["a:7070", None], "x", world_size=2)),
                (TypeError, TypeError, "", lambda: ballast.connect([])),
                (LookupError, ballast.NotFoundError, "NO_SUCH_JOB", lambda: client.state("error", "w")),
                (ValueError, ValueError, "", lambda: client.state("errors", "w", "color"))):
            self.assertTrue(issubclass(kind, pythons))
            with self.subTest(kind), refused(self, kind, reason):
                act()
        with refused(self, ballast.NotFoundError, "OTHER_JOB", varies=True):  # It says how old the service is.
            self.rank("errors", options=dict(job_uid="nothing"))
        rank.session.close()
        rank.session.close()
        with refused(self, ballast.FailedPreconditionError):
            rank.step()

    def test_of_several_services_each_rank_has_its_own_and_a_client_the_first(self):
        nowhere = "unix:/no/such"
        for services in ([self.service.address, nowhere], (self.service.address, nowhere),
                         f"{self.service.address}, {nowhere}"):
            with self.subTest(services):
                ballast.connect(services).jobs()
        with refused(self, ballast.UnavailableError):
            Rank([nowhere, self.service.address], "several", 0, 2, options=dict(join_timeout=0.2))
        with refused(self, ballast.DeadlineError):  # Its service answers, and has no job of rank 0.
            Rank([nowhere, self.service.address], "several", 1, 2, options=dict(join_timeout=0.2))
        self.rank("alone", world_size=2)
        with refused(self, ballast.FailedPreconditionError, "OTHER_DESCRIPTION"):
            Rank([nowhere, self.service.address], "alone", 1, 2)

    def test_a_job_may_say_the_home_of_each_rank(self):
        other = ballast.Service(memory_limit="256MiB")
        self.addCleanup(other.stop)
        addresses = [self.service.address, other.address]
        spread = dict(members=addresses, homes=[0, 1, 1, 0])
        ranks = [Rank(addresses[home], "spread", number, 4, **spread) for number, home in enumerate(spread["homes"])]
        for rank in ranks:
            self.addCleanup(rank.session.close)
        for client in map(ballast.connect, addresses):
            self.assertEqual(client.job("spread")["homes"], spread["homes"])
        with refused(self, ValueError):
            Rank(addresses[0], "short", 0, 4, members=addresses, homes=[0, 1])
        with refused(self, ballast.InvalidArgumentError):
            Rank(addresses[0], "idle", 0, 4, members=addresses, homes=[0] * 4)
        ranks[3].session.close_job()
        for client in map(ballast.connect, addresses):
            self.assertNotIn("spread", [known["name"] for known in client.jobs()])

    def test_trains_over_tls_with_a_token_until_it_is_revoked(self):
        with tempfile.TemporaryDirectory() as name:
            guarded = Guarded(pathlib.Path(name), role="trainer", jobs="mine-*")
            service = processes.Service(ballast._files.program("ballastd"), pathlib.Path(name), *guarded.flags,
                                        "--memory-limit=256MiB", "--shared-memory=never")
            self.addCleanup(service.stop)
            given = dict(tls_ca=str(guarded.authority.certificate), token_file=str(guarded.token))
            rank = Rank(service.address, "mine-1", options=given | dict(timeout=20.0, reconnect_timeout=20.0))
            self.addCleanup(rank.session.close)
            rank.start()
            self.assertTrue(rank.step().applied)
            client = ballast.connect(service.address, **given)
            self.assertEqual([job["committed_step"] for job in client.jobs()], [1])
            with refused(self, ballast.PermissionDeniedError):
                Rank(service.address, "other", options=given)
            with refused(self, ballast.PermissionDeniedError):
                client.load("mine-1")
            with refused(self, ballast.NotFoundError, "NO_SUCH_JOB"):
                client.job("mine-2")
            with tempfile.TemporaryDirectory() as folder:
                wrong = given | dict(tls_ca=str(Authority(pathlib.Path(folder)).certificate))
                with refused(self, ballast.UnavailableError):
                    ballast.connect(service.address, **wrong)
                begin = time.monotonic()
                with processes.written_to_stderr() as said, refused(self, ballast.UnavailableError):
                    Rank(service.address, "mine-1", options=wrong | dict(timeout=600.0, join_timeout=600.0))
                self.assertLess(time.monotonic() - begin, 300)  # Not by these limits.
                self.assertEqual(said(), "")
            with refused(self, ballast.UnavailableError):
                ballast.connect(service.address, token_file=str(guarded.token))
            with refused(self, ballast.UnavailableError):
                ballast.connect(service.address)
            guarded.know()
            with refused(self, ballast.PermissionDeniedError, code=16, varies=True):  # By the step.
                for _ in range(3000):
                    rank.step()
                    time.sleep(0.01)
            with refused(self, ballast.PermissionDeniedError, code=16):
                ballast.connect(service.address, **given)

    def test_a_wait_ends_by_its_timeout_and_by_ctrl_c(self):
        def first_of_two(name):
            rank = self.rank(name, world_size=2)
            # The other rank uploads what it owns, and then makes no step.
            with ballast.Session(self.service.address, job(name, 2), rank.addresses(), rank=1) as other:
                other.upload_weights(rank.addresses())
                rank.start()
            return rank

        rank = first_of_two("timeout")
        rank.session.timeout = 0.3
        with refused(self, ballast.DeadlineError):
            rank.step()
        full = ballast.DeadlineError("the service left 8 payload bytes unacknowledged for 100ms")
        with mock.patch.object(ballast._native, "call", side_effect=full), \
                refused(self, ballast.DeadlineError):
            rank.session.end_gradients(0)
        rank = first_of_two("interrupt")
        rank.session._while_waiting = lambda: os.kill(os.getpid(), signal.SIGINT)
        begun = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            rank.step()
        self.assertLess(time.monotonic() - begun, processes.PATIENCE)  # Its own limit is ten minutes.

    def interrupted(self, name, work):
        """Ctrl-C in the work, whose call of the library goes on until the event that this returns is set."""
        ends, call = threading.Event(), ballast._native.call
        self.addCleanup(ends.set)

        def slow(called, *arguments):
            if called == name:
                ends.wait()
            return call(called, *arguments)

        with mock.patch.object(ballast._native, "call", slow), self.assertRaises(KeyboardInterrupt):
            work()
        return ends

    def test_what_is_written_to_outlives_an_interrupted_call(self):
        def interrupt():
            raise KeyboardInterrupt

        for name, work in (("ballast_read_weights", lambda session, _: session.read_weights()),
                           ("ballast_read_state", lambda session, memory: session.read_state(
                               0, "master", memory.ctypes.data, memory=memory))):
            with self.subTest(name):
                rank = self.rank("kept")
                rank.start()
                rank.session.close()
                weights, plane = [array.copy() for array in rank.arrays], np.empty(SHAPES["w"], np.float32)
                kept = [weakref.ref(array) for array in weights + [plane] * ("state" in name)]
                session = ballast.Session(self.service.address, job("kept"), [w.ctypes.data for w in weights],
                                          memory=weights, while_waiting=interrupt)
                ends = self.interrupted(name, lambda: work(session, plane))
                self.assertTrue(session.ended)
                session.close()
                del session, weights, plane
                gc.collect()
                self.assertTrue(all(memory() is not None for memory in kept))
                ends.set()
                processes.await_("an end of the call", lambda: not any(memory() is not None for memory in kept))

    def test_an_interrupted_open_is_closed(self):
        def interrupt():
            raise KeyboardInterrupt

        rank = self.rank("open")
        rank.start()
        rank.session.close()
        closed, library = [], ballast._native.library()
        ends = self.interrupted("ballast_open", lambda: ballast.Session(
            self.service.address, job("open"), rank.addresses(), while_waiting=interrupt))
        close = library.ballast_close
        with mock.patch.object(library, "ballast_close", lambda handle: (closed.append(handle.value), close(handle))):
            ends.set()
            processes.await_("the close of what was opened", lambda: closed)
        self.assertIsNotNone(closed[0])

    def test_a_service_ends_with_the_process_that_started_it(self):
        for way in ("sys.exit(0)", "os.kill(os.getpid(), 9)"):
            script = ("import os, sys, ballast\n"
                      "service = ballast.Service()\n"
                      "print(service.pid, flush=True)\n" + way)
            done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False,
                                  env=os.environ | {"PYTHONPATH": str(ROOT / "client/python")}, timeout=60)
            pid = int(done.stdout)
            processes.await_(f"the service's end after {way}", lambda: processes.state_of(pid) in ("Z", "X", ""))

    def test_a_service_outlives_ranks_and_ends_with_their_agent(self):
        begin = "service = outliving.OutlivingService(None, None); print(service.address, flush=True); "
        die, other = "os.kill(os.getpid(), 9)", "os.environ['TORCHELASTIC_RUN_ID'] = 'other'; "
        idle = "outliving.IDLE_SECONDS = 0.2; "
        await_end = "processes.await_('the end of an idle service', lambda: not outliving._lives(outliving._folder(False)))"
        open_to_all = "folder = outliving._folder(False); folder.mkdir(); folder.chmod(0o755); "
        one, again, another, _ = self.of_agent(begin + die, begin + die, other + begin + die, begin + "sys.exit(1)")
        self.assertEqual(one, again)
        self.assertNotEqual(one, another)
        self.assertEqual(len(self.of_agent(idle + begin + die, await_end)), 1)
        self.assertEqual(self.of_agent(f"{open_to_all}\ntry: {begin}\nexcept ballast.FailedPreconditionError: print('refused')"
                                       "\nfolder.rmdir()"), ["refused"])

    def of_agent(self, *ranks):
        """What ranks print, which one agent starts one after the other; nothing else is left of them."""
        start = "import os, sys, ballast, processes\nfrom ballast import outliving\n"
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", "import subprocess, sys\n"
                 "for rank in sys.argv[1:]: subprocess.run([sys.executable, '-c', rank])", *(start + rank for rank in ranks)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, timeout=60,  # Until all have ended.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder})
            self.assertEqual(os.listdir(folder), [], done.stderr)
            self.assertEqual(done.stderr, "")
            return done.stdout.splitlines()

    def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
            left, users, strange = (pathlib.Path(folder, f"ballast-{name}") for name in
                                    ("service-left", "service-users", "service-strange"))
            for each in (left, users, strange):
                each.mkdir()
            for file in (left / "lock", left / "ballastd.log", users / "lock", users / "notes"):
                file.touch()
            os.mkfifo(strange / "lock")
            ballast.Service(memory_limit="100MiB").stop()
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).glob("*/*")), ["lock", "notes"])
            self.assertFalse(left.exists())

    def test_a_script_that_closes_nothing_ends_silently(self):
        script = ("import sys, numpy as np, ballast\n"
                  "service = ballast.Service()\n"
                  "weights = np.zeros(3, np.float32)\n"
                  "job = ballast.Job('job', [ballast.Group('all', ballast.HyperParameters())],\n"
                  "                  [ballast.Parameter('w', (3,))])\n"
                  "session = ballast.Session(service.address, job, [weights.ctypes.data])\n"
                  "session.upload_weights([weights.ctypes.data])\n"
                  "print(session.committed_step)")
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False,
                              env=os.environ | {"PYTHONPATH": str(ROOT / "client/python")}, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "0\n", ""))

    def test_a_service_that_cannot_start_says_why(self):
        with refused(self, ballast.UnavailableError):
            ballast.Service(memory_limit="much")

    def test_a_service_with_a_host_admits_those_whom_it_trusts(self):
        certificates = []

        def exchange(own):
            certificates.append(own)
            return certificates

        def lets_in(one, other):
            try:
                ballast.connect(one.address_for_others, timeout=2, **tls_files(other.address))
            except ballast.UnavailableError:
                return False
            return True

        with ballast.Service(memory_limit="1MiB", host="127.0.0.1", exchange=exchange) as first, \
                ballast.Service(memory_limit="1MiB", host="127.0.0.1", exchange=exchange) as second:
            self.assertTrue(lets_in(first, first))
            self.assertTrue(lets_in(second, second))
            self.assertFalse(lets_in(first, second))  # It started before it could know of the second.
            first.trust(lambda own: certificates)
            processes.await_("its trust", lambda: lets_in(first, second))
            self.assertTrue(lets_in(second, first))
            for file in tls_files(first.address).values():
                self.assertEqual(os.stat(file).st_mode & 0o777, 0o600)

    def test_a_fork_leaves_session_and_service_alone(self):
        rank = self.rank("forked")
        rank.start()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank.session.read_weights()
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
            rank.session.close()
            self.service.stop()
            os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertTrue(rank.step().applied)


if __name__ == "__main__":
    unittest.main()
