#!/usr/bin/env python3
"""ballast.torch with weights that come back while the next forward runs: the bits of a run in which step() waits for
them, and nobody reads old ones."""

import contextlib
import copy
import functools
import gc
import io
import itertools
import os
import pathlib
import signal
import socket
import tempfile
import threading
import unittest
import weakref
from unittest import mock

import torch
from overlap_test import weights
from ranks_for_tests import run_ranks  # Which also lets the next one be found.
import processes
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_test import Model, batch, loss_of, names

import ballast
import ballast.torch
from ballast import _files
from ballast.torch import binding

WIDTH = 520  # A layer has a little more elements than a chunk, which is 1 MiB.
LAYERS = 4
_numbers = itertools.count()


class Layers(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(2)
        super().__init__(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def loss_of_layers(model, step):
    return model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()


class Valve:
    """A unix socket behind which the service is; what comes from the service can be held back."""

    def __init__(self, service, path):
        self.address = f"unix:{path}"
        self._service = service.removeprefix("unix:")
        self._changed = threading.Condition()
        self._left = None  # Bytes that may still come; None: any number.
        self._waits = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, size):
        with self._changed:
            self._left, self._waits = size, False

    def open(self):
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def await_held(self):
        """Returns when something is held back."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waits, processes.PATIENCE):
                raise AssertionError("nothing is held back")

    def _accept(self):
        while True:
            trainer, _ = self._listener.accept()
            service = socket.socket(socket.AF_UNIX)
            try:
                service.connect(self._service)
            except OSError:
                trainer.close()
                service.close()
                continue
            for source, sink, passes in ((trainer, service, len), (service, trainer, self._pass)):
                threading.Thread(target=self._forward, args=(source, sink, passes), daemon=True).start()

    def _pass(self, data):
        with self._changed:
            if self._left is not None and self._left < len(data):
                self._waits = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._left is None)
            if self._left is not None:
                self._left -= len(data)

    def _forward(self, source, sink, passes):
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                passes(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


class OverlapWeightsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def optimizer(self, model, overlap_weights=True, **options):
        job = f"{self.id().rpartition('.')[2]}-{next(_numbers)}"
        optimizer = ballast.torch.AdamW(
            options.pop("params", None) or names(model), **{
                "lr": 0.01, "service": self.service.address, "job": job, "module": model,
                "overlap_weights": overlap_weights} | options)
        self.addCleanup(self.close, weakref.ref(optimizer))
        return optimizer

    def close(self, optimizer):
        if optimizer() is not None:
            with contextlib.suppress(ballast.BallastError, RuntimeError):
                optimizer().close()

    def assert_same_weights(self, one, other):
        for (name, a), b in zip(weights(one).items(), weights(other).values()):
            self.assertTrue(torch.equal(a, b), name)

    def coming(self, optimizer):
        return len(optimizer._binding._returning.coming)

    def trained(self, steps=2, model_of=Model, loss=lambda model, step: loss_of(model, batch(step)), **options):
        """A model after these steps whose weights are coming, its optimizer, and the model that it is to be."""
        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()

        (expected, _), (model, optimizer) = self.both_ways(step_of, steps, model_of, options)
        self.assertEqual(self.coming(optimizer), len({id(p) for _, p in names(model)}))
        return model, optimizer, expected

    def both_ways(self, step_of, steps, model_of, options):
        """Without and with overlap_weights: a model after these steps, and its optimizer."""
        for overlap_weights in (False, True):
            torch.manual_seed(3)
            model = model_of()
            optimizer = self.optimizer(model, overlap_weights, **options)
            for step in range(steps):
                step_of(model, optimizer, step)
            yield model, optimizer

    # ------------------------------------------------------------ the same bits

    def assert_same(self, step_of, steps=5, model_of=Model, **options):
        models = []
        for model, optimizer in self.both_ways(step_of, steps, model_of, options):
            optimizer.close()
            models.append(model)
        self.assert_same_weights(*models)

    def test_same_bits(self):
        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            loss_of(model, batch(step), seldom=step % 2 == 0).backward()
            optimizer.step()

        for overlap, options in itertools.product((False, True), (
                {}, {"update": "speculate"}, {"max_norm": 0.1},
                {"accumulation_steps": 1, "update": "speculate", "max_norm": 1000.0})):
            with self.subTest(overlap=overlap, **options):
                self.assert_same(step_of, overlap=overlap, **options)
        self.assert_same(step_of, model_of=lambda: Model(torch.bfloat16), overlap=True)

    def test_same_bits_with_accumulation_and_evaluation(self):
        def step_of(model, optimizer, step):
            for micro_step in range(3):
                (loss_of(model, batch(10 * step + micro_step), seldom=micro_step == 1) / 3).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.inference_mode() if step % 2 else torch.no_grad():
                loss_of(model, batch(step))

        for overlap, update in ((False, "wait"), (True, "wait"), (True, "speculate")):
            with self.subTest(overlap=overlap, update=update):
                self.assert_same(step_of, overlap=overlap, update=update)

    def test_same_bits_with_checkpoints_and_parameters_elsewhere(self):
        """Layers that are called again in backward and are shared, that are called now and then, and whose state is
        read between forward and backward; lists of parameters; attention, which reads what it does not call; and a
        parameter that is not contiguous, to which weights are copied."""
        class Many(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.inner = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
                self.attention = torch.nn.MultiheadAttention(6, 2)
                self.scales = torch.nn.ParameterList([torch.ones(6), torch.ones(6)])
                self.turned = torch.nn.Parameter(torch.randn(6, 6).t())
                self.seldom, self.never = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

            def forward(self, x, reentrant, seldom=False):
                x = self.first(x)
                if seldom:
                    x = self.seldom(x)
                for scale in self.scales:
                    x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=reentrant) * scale
                return self.attention(x, x, x)[0] @ self.turned

        def step_of(model, optimizer, step):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = model(torch.randn(4, 6), step % 2 == 0, seldom=step in (1, 2)).square().sum()
            if step == 4:
                model.state_dict()
            loss.backward()
            optimizer.step()
            if step == 2:
                with torch.inference_mode():
                    model(torch.randn(4, 6), False)

        for overlap in (False, True):
            self.assert_same(step_of, steps=6, model_of=Many, overlap=overlap)

    def test_two_optimizers_of_one_module(self):
        """Of which one's parameters are frozen while the other's are trained; not contiguous, they are copied to."""
        class Pair(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.generator, self.judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
                self.judge.weight = torch.nn.Parameter(torch.randn(4, 4).t())

        def train(overlap_weights):
            torch.manual_seed(3)
            pair = Pair()
            both = [self.optimizer(pair, overlap_weights, overlap=True,
                                   params=[(f"{name}.{n}", p) for n, p in getattr(pair, name).named_parameters()])
                    for name in ("generator", "judge")]
            for step in range(4):
                made = pair.generator(torch.full((2, 4), float(step)))
                pair.judge(made.detach()).square().sum().backward()
                both[1].step()
                pair.judge.requires_grad_(False)
                pair.judge(made).square().sum().backward()
                pair.judge.requires_grad_(True)
                both[0].step()
                pair.zero_grad()
            for optimizer in both:
                optimizer.close()
            return pair

        self.assert_same_weights(train(False), train(True))

    def test_a_skipped_step_and_one_that_is_undone(self):
        model, optimizer, _ = self.trained(keep_previous=True)
        optimizer.wait_for_weights()
        before = weights(model)
        loss_of(model, batch(5)).backward()
        optimizer.step()
        self.assertEqual(optimizer.undo_step(), 2)
        self.assertTrue(all(torch.equal(before[name], after) for name, after in weights(model).items()))
        (loss_of(model, batch(5)) * float("inf")).backward()
        with self.assertWarnsRegex(UserWarning, "changed nothing"):
            optimizer.step()
        self.assertIsNotNone(optimizer.skipped)
        self.assertEqual(self.coming(optimizer), 0)
        self.assertTrue(all(torch.equal(before[name], after) for name, after in weights(model).items()))

    # ------------------------------------------------------------ who waits

    def test_whoever_reads_all_weights_waits_for_them(self):
        def evaluate(model, optimizer):
            with torch.no_grad():
                model.inner(torch.ones(20))  # What it reads would be told by no backward.

        def average(model, optimizer):
            average = torch.optim.swa_utils.AveragedModel(Model())
            average.update_parameters(model)
            return average.module

        def in_a_fork(model, optimizer):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                with os.fdopen(write, "wb") as file:
                    torch.save(weights(model), file)
                os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as file:
                saved = io.BytesIO(file.read())
            os.waitpid(child, 0)
            return saved

        def saved(model, optimizer):
            file = io.BytesIO()
            torch.save(model, file)
            return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

        readers = {
            "wait_for_weights": lambda model, optimizer: optimizer.wait_for_weights(),
            "state_dict": lambda model, optimizer: model.state_dict(),
            "state_dict of a part": lambda model, optimizer: model.inner.state_dict(),
            "load_state_dict": lambda model, optimizer: model.load_state_dict(model.state_dict()),
            "close": lambda model, optimizer: optimizer.close(),
            "deepcopy": lambda model, optimizer: copy.deepcopy(model),
            "deepcopy of a parameter": lambda model, optimizer: copy.deepcopy(model.inner.bias),
            "an evaluation": evaluate, "an average": average, "a fork": in_a_fork, "a file": saved,
            "a move": lambda model, optimizer: model.to(torch.float32),
        }
        for name, read in readers.items():
            with self.subTest(name):
                model, optimizer, expected = self.trained()
                returning = optimizer._binding._returning
                had = read(model, optimizer)
                self.assertEqual(len(returning.coming), 0)
                self.assert_same_weights(model, expected)
                if isinstance(had, Model):
                    self.assert_same_weights(had, expected)
                    loss_of(had, batch(0)).backward()  # Its hooks do nothing.
                if isinstance(had, io.BytesIO):
                    for key, weight in torch.load(had).items():
                        self.assertTrue(torch.equal(weight, weights(expected)[key]), key)

    def test_a_state_is_of_a_step_that_has_ended(self):
        model, optimizer, _ = self.trained(full_state=True)
        state = optimizer.state_dict()
        self.assertEqual(state["param_groups"][0]["job_step"], 2)
        self.assertFalse(optimizer._binding._in_step)
        self.assertEqual(self.coming(optimizer), 7)  # It has none of these.

    def test_weights_come_also_when_the_optimizer_has_gone(self):
        model, optimizer, expected = self.trained()
        bound = weakref.ref(optimizer._binding)
        del optimizer
        gc.collect()
        loss_of(model, batch(0), seldom=True).backward()
        self.assert_same_weights(model, expected)
        gc.collect()
        self.assertIsNone(bound())

    # ------------------------------------------------------------ what cannot be right is told

    def test_what_nobody_saw_being_read_is_an_error(self):
        class Direct(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

            def forward(self, x):
                return self.outer(functional.linear(x, self.inner.weight, self.inner.bias))

        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                model = Direct()
                optimizer = self.optimizer(model, overlap=overlap)
                for _ in range(2):
                    optimizer.wait_for_weights()  # As the error says.
                    model(torch.ones(4)).sum().backward()
                    optimizer.step()
                with self.assertRaisesRegex(RuntimeError, r"inner\.\w+ has a gradient, and no forward .* was seen "
                                                          r".*wait_for_weights\(\)"):
                    model(torch.ones(4)).sum().backward()

    def test_gradients_without_any_forward_are_an_error(self):
        """As of a CUDA graph that is replayed: no hook runs."""
        model, optimizer, _ = self.trained()
        for _, parameter in names(model):
            parameter.grad = torch.ones_like(parameter)
        with self.assertRaisesRegex(RuntimeError, r"no forward of module= was seen .*wait_for_weights\(\)"):
            optimizer.step()
        optimizer.wait_for_weights()
        optimizer.step()

    def test_a_compiled_model(self):
        """It is refused where it is seen. Where it is not, hooks are called from between what is compiled, which
        does not look at what is coming; or they are not called, and gradients tell."""
        model = Model()
        for compiled in (torch.compile(Model(), backend="eager"), torch.nn.Sequential(torch.compile(Model()))):
            with self.assertRaisesRegex(ValueError, "OptimizedModule reads, which is compiled.*overlap_weights=False"):
                self.optimizer(model, module=compiled, params=names(compiled))
        in_place = Model()
        in_place.compile(backend="eager")
        with self.assertRaisesRegex(ValueError, "what Model reads, which is compiled"):
            self.optimizer(in_place)
        models = []
        for overlap_weights in (False, True):
            torch._dynamo.reset()
            models.append(Model())
            optimizer = self.optimizer(models[-1], overlap_weights)
            forward = models[-1]  # The first step() puts hooks there.
            with torch._dynamo.config.patch(error_on_recompile=True):
                for step in range(5):
                    loss_of(forward, batch(step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    forward = torch.compile(models[-1], backend="eager")
            optimizer.close()
        self.assert_same_weights(*models)
        torch._dynamo.reset()
        model = Model()
        compiled = torch.compile(model, backend="eager")
        optimizer = self.optimizer(model)
        loss_of(compiled, batch(0)).backward()  # It has seen no hooks, and does not look again.
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "a compiled or captured model"):
            loss_of(compiled, batch(1)).backward()

    def test_a_parameter_that_is_written_while_its_weights_come_is_an_error(self):
        def swapped(model):
            model.inner.weight.data = torch.zeros(20, 20)

        def written(model):
            with torch.no_grad():
                model.inner.weight.zero_()

        for change in (swapped, written):
            with self.subTest(change.__name__):
                model, optimizer, _ = self.trained()
                change(model)
                with self.assertRaisesRegex(RuntimeError, r"inner.weight was changed, or moved, while its weights were "
                                                          r"coming back.*wait_for_weights\(\)"):
                    loss_of(model, batch(3))
                with self.assertRaisesRegex(ballast.FailedPreconditionError, "inner.weight was changed"):
                    model.state_dict()
                optimizer.attach()
                loss_of(model, batch(3)).backward()

    def test_who_cannot_wait_says_so(self):
        """A replica of DataParallel, and a graph that is captured; both are of GPUs."""
        model, optimizer, _ = self.trained()
        model.embedding._is_replica = True
        with self.assertRaisesRegex(RuntimeError, "a DataParallel that is not the optimizer's module="):
            loss_of(model, batch(0))
        model.embedding._is_replica = False
        with mock.patch.object(torch.cuda, "is_available", lambda: True), \
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True), \
                self.assertRaisesRegex(RuntimeError, r"a CUDA graph cannot wait.*wait_for_weights\(\)"):
            loss_of(model, batch(0))
        loss_of(model, batch(0)).backward()
        optimizer.step()

    def test_refusals(self):
        model = Model()
        scripted = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))
        for options, said in (({"module": None}, "give module= the model"),
                              ({"module": model.inner}, "seldom is in no submodule of module="),
                              ({"module": torch.nn.ModuleList(model.children())}, "seldom is in no submodule"),
                              ({"module": scripted, "params": names(scripted)},
                               "what RecursiveScriptModule reads, which is compiled.*overlap_weights=False")):
            with self.assertRaisesRegex(ValueError, said) as raised:
                self.optimizer(model, **options)
            self.assertNotIn("\n", str(raised.exception))


class HeldBackTest(unittest.TestCase):
    """Over a connection on which weights are held back: layer by layer in the order of the chunks, since one thread
    makes them and no memory is shared."""

    def setUp(self):
        torch.set_num_threads(1)
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.service = processes.Service(_files.program("ballastd"), folder, "--memory-limit=1GiB", "--threads=1",
                                         "--shared-memory=never", "--most-deaths=0", *self.flags(),
                                         listen=f"unix:{folder / 'socket'}")
        self.addCleanup(self.service.stop)
        self.valve = Valve(self.service.address, folder / "valve")

    def flags(self):
        return ["--holder=none"] if self._testMethodName == "test_the_service_is_gone_for_good" else []

    def trained(self, steps=3, hold=10 << 18, **options):
        """A model after these steps, of which the weights of the last are held back, but for two chunks; its optimizer,
        and the weights that it is to have."""
        for overlap_weights in (False, True):
            model = Layers()
            optimizer = ballast.torch.AdamW(model.named_parameters(), lr=0.01, service=self.valve.address,
                                            job=f"job{next(_numbers)}", module=model,
                                            overlap_weights=overlap_weights, **options)
            for step in range(steps):
                if overlap_weights and step + 1 == steps:
                    optimizer.wait_for_weights()
                    self.before = weights(model)
                    self.valve.hold_after(hold)
                loss_of_layers(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not overlap_weights:
                expected = weights(model)
                optimizer.close()
        self.valve.await_held()
        here = weakref.ref(optimizer)
        self.addCleanup(lambda: here() and here().close())
        self.addCleanup(self.valve.open)
        return model, optimizer, expected

    def assert_weights(self, model, expected, indices=range(LAYERS)):
        for name, weight in weights(model).items():
            if int(name.split(".")[0]) in indices:
                self.assertTrue(torch.equal(weight, expected[name]), name)

    def test_a_forward_begins_before_the_last_weights_are_there(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                model, optimizer, expected = self.trained(overlap=overlap, timeout=30)
                ran = []

                def ran_first(*_):
                    self.assertTrue(self.valve._waits)
                    self.assert_weights(model, expected, [0])
                    self.assert_weights(model, self.before, [LAYERS - 1])
                    ran.append(optimizer._binding._returning.coming)
                    self.valve.open()

                hook = model[0].register_forward_hook(ran_first)
                loss_of_layers(model, 7).backward()
                hook.remove()
                self.assertEqual(ran, [{index for index in range(2, 2 * LAYERS)}])
                self.assert_weights(model, expected)
                optimizer.close()

    def test_whoever_reads_all_weights_waits_until_the_last_are_there(self):
        def evaluate(model, optimizer):
            with torch.no_grad():
                model[0](torch.ones(WIDTH))

        for name, read in {"state_dict": lambda model, optimizer: model.state_dict(), "an evaluation": evaluate,
                           "wait_for_weights": lambda model, optimizer: optimizer.wait_for_weights(),
                           "close": lambda model, optimizer: optimizer.close(),
                           "the next step": lambda model, optimizer: optimizer.step()}.items():
            with self.subTest(name):
                model, optimizer, expected = self.trained()
                optimizer._binding.session._while_waiting = self.valve.open
                read(model, optimizer)
                self.assertIsNone(self.valve._left)
                self.assert_weights(model, expected)
                optimizer.close()

    def test_nobody_waits_for_the_weights_of_a_model_that_has_gone(self):
        """The memory that they are written to stays until the session is closed."""
        model, optimizer, expected = self.trained()
        session, addresses = weakref.ref(optimizer._binding.session), [p.data_ptr() for p in model.parameters()]
        there, close = [], binding.Session.close

        def closes(session):
            there.append([place.data_ptr() for place in session._memory] == addresses)
            close(session)

        with mock.patch.object(binding.Session, "close", closes):
            del model, optimizer
            gc.collect()
        self.assertIsNone(session())
        self.assertTrue(there[0])

    def test_an_interrupted_forward_is_done_again(self):
        model, optimizer, expected = self.trained()
        session = optimizer._binding.session
        session._while_waiting = lambda: os.kill(os.getpid(), signal.SIGINT)
        with self.assertRaises(KeyboardInterrupt):
            loss_of_layers(model, 7)
        session._while_waiting = self.valve.open
        loss_of_layers(model, 7).backward()
        self.assert_weights(model, expected)
        optimizer.step()

    def test_weights_that_do_not_come_in_time(self):
        model, optimizer, expected = self.trained()
        optimizer._binding.session.timeout = 0.2
        with self.assertRaisesRegex(ballast.DeadlineError, "the end of the step did not arrive within 0.2 s") as raised:
            loss_of_layers(model, 7)
        self.assertNotIn("\n", str(raised.exception))
        for use in (lambda: loss_of_layers(model, 7), model.state_dict, optimizer.step):
            with self.assertRaisesRegex(ballast.FailedPreconditionError, r"attach\(\) takes the job's weights"):
                use()
        self.assertEqual(optimizer.state_dict()["param_groups"][0]["job_step"], 3)
        self.valve.open()
        self.assertEqual(optimizer.attach(), 3)
        self.assert_weights(model, expected)
        loss_of_layers(model, 7).backward()
        optimizer.step()

    def kill(self, pid):
        os.kill(pid, signal.SIGKILL)
        processes.await_("the end of the service", lambda: processes.state_of(pid) in ("", "Z"))

    def await_committed(self, job):
        """The service has ended the step, and not sent all of it."""
        client = ballast.connect(self.service.address)
        processes.await_("the step's end", lambda: [j for j in client.jobs()
                                                    if j["name"] == job and j["committed_step"] == 3])

    def test_a_fork_whose_weights_did_not_come_says_so(self):
        model, optimizer, _ = self.trained()
        optimizer._binding.session.timeout = 0.2
        for read in (lambda: loss_of_layers(model, 7), model.state_dict):
            child = os.fork()  # It waits for them in vain.
            if child == 0:
                said = ""
                try:
                    read()
                except ballast.FailedPreconditionError as error:
                    said = str(error)
                os._exit(0 if "a fork of one whose weights were still coming; call wait_for_weights()" in said else 1)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_the_service_dies_while_weights_are_coming(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                model, optimizer, expected = self.trained(overlap=overlap)
                self.await_committed(optimizer._settings["job"])
                self.kill(processes.children_of(self.service.process.pid)[0])
                optimizer._binding.session._while_waiting = self.valve.open
                loss_of_layers(model, 7).backward()
                self.assert_weights(model, expected)
                optimizer.step()
                self.assertEqual(optimizer._binding.step_count, 4)
                optimizer.close()

    def test_the_service_is_gone_for_good(self):
        with mock.patch.object(binding, "Session", functools.partial(binding.Session, reconnect_timeout=0.3)):
            model, optimizer, _ = self.trained()
        self.kill(self.service.process.pid)
        self.valve.open()
        with self.assertRaisesRegex(ballast.UnavailableError, "step 3: the stream broke .* could not be reopened .*"
                                                              "check that the service runs") as raised:
            loss_of_layers(model, 7)
        self.assertNotIn("\n", str(raised.exception))
        for use in (lambda: loss_of_layers(model, 7), model.state_dict, optimizer.step, optimizer.wait_for_weights):
            with self.assertRaisesRegex(ballast.FailedPreconditionError, r"attach\(\)"):
                use()


class RanksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def ranks(self, world_size, *cases):
        return run_ranks("overlap_ranks", world_size, [
            (function, {"service": self.service.address, "job": f"job-{next(_numbers)}", **options})
            for function, options in cases])

    def test_same_bits_on_two_ranks(self):
        cases = [("fsdp", {"overlap": False}), ("fsdp", {"overlap": True, "accumulation": 2}),
                 ("fsdp", {"overlap": True, "update": "speculate"}), ("ddp", {"overlap": False}),
                 ("ddp", {"overlap": True, "accumulation": 2})]
        results = self.ranks(2, *[(function, options | {"overlap_weights": overlap_weights})
                                  for function, options in cases for overlap_weights in (False, True)])
        for case, without, with_it in zip(cases, results[::2], results[1::2]):
            with self.subTest(case):
                self.assertEqual([digest for digest, _ in with_it], [digest for digest, _ in without])

    def test_same_bits_with_replicas(self):
        results = self.ranks(4, *[
            ("fsdp", {"overlap": True, "replicas": 2, "overlap_weights": overlap_weights, "evaluates": evaluates})
            for evaluates in (False, True) for overlap_weights in (False, True)])
        for without, with_it in zip(results[::2], results[1::2]):
            self.assertEqual([digest for digest, _ in with_it], [digest for digest, _ in without])

    def test_who_may_read_weights_alone(self):
        of_fsdp, of_ddp = self.ranks(2, ("reads_shards_alone", {}), ("reads_replicas_alone", {}))
        self.assertEqual(of_fsdp, [[0] * 6, [0]])
        for told in of_ddp:
            for said in told[:4]:
                self.assertIn("wait_for_weights() on all ranks", said)
                self.assertNotIn("\n", said)
            self.assertEqual(told[4:6], ["the state of step 2", 0])


if __name__ == "__main__":
    unittest.main()
