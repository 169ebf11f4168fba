#!/usr/bin/env python3
"""ballast.torch with weights that come back while the next forward runs: the bits of a run in which step() waits for
them, and nobody reads old ones, however that is done."""

import contextlib
import copy
import ctypes
import gc
import io
import itertools
import os
import pathlib
import pickle
import signal
import socket
import tempfile
import threading
import unittest
import weakref
from unittest import mock

import numpy
import torch
from overlap_test import weights
from ranks_for_tests import run_ranks  # Which also lets the next one be found.
import processes
from messages import refused
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_test import Model, batch, loss_of, names

import ballast
import ballast.torch
from ballast import _files
from ballast.torch import boundaries, guard

WIDTH = 520  # A layer has a little more elements than a chunk, which is 1 MiB.
LAYERS = 4
_numbers = itertools.count()


class Layers(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(2)
        super().__init__(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


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
                "lr": 0.01, "service": self.service.address, "job": job, "overlap_weights": overlap_weights} | options)
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
        return len(optimizer._binding.flows.returning.coming)

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

    def test_what_waits_for_all_weights(self):
        def in_a_fork(model, optimizer):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                with os.fdopen(write, "wb") as file:
                    torch.save(weights(model), file)
                os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as file:
                saved = torch.load(io.BytesIO(file.read()))
            os.waitpid(child, 0)
            return saved

        def replayed(model, optimizer):
            with self.assertRaises(TypeError):  # It is no graph.
                torch.cuda.CUDAGraph.replay(object())

        for name, read in {
                "wait_for_weights": lambda model, optimizer: optimizer.wait_for_weights(),
                "state_dict": lambda model, optimizer: model.state_dict(),
                "load_state_dict": lambda model, optimizer: model.load_state_dict(model.state_dict()),
                "close": lambda model, optimizer: optimizer.close(),
                "a move": lambda model, optimizer: model.to(torch.float32),
                "a fork": in_a_fork, "a replay of a CUDA graph": replayed}.items():
            with self.subTest(name):
                model, optimizer, expected = self.trained()
                returning = optimizer._binding.flows.returning
                had = read(model, optimizer)
                self.assertEqual(len(returning.coming), 0)
                self.assert_same_weights(model, expected)
                self.assertTrue(all(type(p) is torch.nn.Parameter for p in model.parameters()))
                for key, weight in (had if name == "a fork" else {}).items():
                    self.assertTrue(torch.equal(weight, weights(expected)[key]), key)

    def test_a_copy_is_of_the_new_weights_and_has_no_guard(self):
        def saved(model):
            file = io.BytesIO()
            torch.save(model, file)
            return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

        def averaged(model):
            average = torch.optim.swa_utils.AveragedModel(Model())
            average.update_parameters(model)
            return average.module

        for copied in (copy.deepcopy, saved, averaged):
            with self.subTest(copied.__name__):
                model, optimizer, expected = self.trained()
                had = copied(model)
                self.assertEqual(self.coming(optimizer), 0)
                self.assert_same_weights(had, expected)
                loss_of(had, batch(0)).backward()
                self.assertTrue(all(type(p) is torch.nn.Parameter for p in had.parameters()))

    def test_same_bits_of_an_average_made_by_hand(self):
        """And of a clip of weights, which is an error as without overlap_weights; in all modes."""
        for overlap in (False, True):
            averages = []

            def step_of(model, optimizer, step):
                if step == 0:
                    averages.append({name: p.detach().clone() for name, p in model.named_parameters()})
                optimizer.zero_grad()
                loss_of(model, batch(step), seldom=step % 2 == 0).backward()
                optimizer.step()
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        averages[-1][name].mul_(0.9).add_(parameter.data, alpha=0.1)

            self.assert_same(step_of, overlap=overlap)
            plain, guarded = averages
            for name, average in plain.items():
                self.assertTrue(torch.equal(average, guarded[name]), name)

    def test_same_bits_where_a_weight_is_read_and_its_module_not_called(self):
        """As a loss that is computed in chunks reads the head's weight, and a module what its parts have."""
        class Language(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.inner = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 6)
                self.lm_head = torch.nn.Linear(6, 9, bias=False)

            def forward(self, tokens):
                return functional.linear(self.embedding(tokens), self.inner.weight, self.inner.bias)

        def step_of(model, optimizer, step):
            tokens = torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(step))
            logits = torch.cat([chunk @ model.lm_head.weight.t() for chunk in model(tokens).flatten(0, 1).split(4)])
            functional.cross_entropy(logits, tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        for overlap in (False, True):
            self.assert_same(step_of, model_of=Language, overlap=overlap)

    def test_memory_that_others_have_comes_in_the_step(self):
        """What is kept of one parameter has the new weights when step() returns, as without overlap_weights."""
        kept = {
            "its data": lambda model: model.inner.weight.data,
            "an array": lambda model: model.inner.weight.detach().numpy(),
            "a state": lambda model: model.inner.state_dict(keep_vars=False)["weight"],
            "a script": lambda model: torch.jit.trace(model.inner, torch.ones(20)),
            "a graph of autograd": lambda model: model.inner(torch.ones(20, requires_grad=True)),
        }
        for name, keep in kept.items():
            with self.subTest(name):
                model, optimizer, _ = self.trained()
                index = next(i for i, p in optimizer._binding.flows.returning._parameters.items() if p is model.inner.weight)
                optimizer.zero_grad()
                loss_of(model, batch(3)).backward()
                alias = keep(model)
                optimizer.step()
                coming = optimizer._binding.flows.returning.coming
                self.assertNotIn(index, coming)
                self.assertGreaterEqual(len(coming), 5)
                if name in ("its data", "an array", "a state"):
                    self.assertTrue(numpy.array_equal(numpy.asarray(alias), model.inner.weight.detach().numpy()))
        model = Model().share_memory()
        optimizer = self.optimizer(model)
        loss_of(model, batch(3)).backward()
        optimizer.step()
        self.assertEqual(self.coming(optimizer), 0)

    def test_a_graph_from_before_the_step_is_of_no_use(self):
        model, optimizer, _ = self.trained()
        loss = loss_of(model, batch(5))
        loss.backward(retain_graph=True)
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_a_write_waits_and_is_the_error_that_it_is_without(self):
        def swapped(model):
            model.inner.weight.data = torch.zeros(20, 20)

        def written(model):
            with torch.no_grad():
                model.inner.weight.zero_()

        for change in (swapped, written):
            with self.subTest(change.__name__):
                model, optimizer, expected = self.trained()
                change(model)
                loss_of(model, batch(3)).backward()
                with refused(self, RuntimeError):
                    optimizer.step()
                with torch.no_grad():
                    model.inner.weight.copy_(expected.inner.weight)
                self.assert_same_weights(model, expected)

    def test_compiled(self):
        """Each module by itself, the whole model before and after the optimizer has it, a function that calls it: no
        other class reaches dynamo, so nothing is compiled again."""
        def in_place(model):
            for each in model:
                each.compile(backend="eager", fullgraph=True)
            return model

        def parts(model):
            for name, each in list(model.named_children()):
                setattr(model, name, torch.compile(each, backend="eager"))
            return model

        def made(overlap_weights, compiles, late, overlap):
            torch._dynamo.reset()
            torch.manual_seed(3)
            model = torch.nn.Sequential(*[Block() for _ in range(3)])
            forward = model if late else compiles(model)
            optimizer = self.optimizer(model, overlap_weights, params=list(model.named_parameters()), overlap=overlap)
            for step in range(3):
                if late and step == 1:
                    forward = compiles(model)
                if overlap_weights and step > 1:
                    self.assertEqual(self.coming(optimizer), 6)
                forward(torch.full((2, 6), float(step), requires_grad=True)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
            return [parameter.detach() for parameter in model.parameters()]

        def whole(model):
            return torch.compile(model, backend="aot_eager")

        def function(model):
            compiled = torch.compile(lambda x, weight: model(x) @ weight, backend="eager")
            return lambda x: compiled(x, model[0].linear.weight)

        for compiles, late in ((in_place, False), (in_place, True), (parts, False), (whole, False), (whole, True),
                               (function, False)):
            with self.subTest(compiles.__name__, late=late):
                expected = made(False, compiles, late, False)
                with torch._dynamo.config.patch(error_on_recompile=True):
                    had = made(True, compiles, late, overlap=not late)
                self.assertTrue(all(map(torch.equal, had, expected)))

    def test_a_compiled_module_waits_for_its_own_weights_before_it_runs(self):
        seen = []

        def backend(graph, _):
            def run(*arguments):
                seen.append((set(optimizer._binding.flows.returning.coming), {type(a) for a in arguments}))
                return graph(*arguments)

            return run

        torch._dynamo.reset()
        model = torch.nn.Sequential(*[Block() for _ in range(3)])
        optimizer = self.optimizer(model, params=list(model.named_parameters()))
        for step in range(3):
            model(torch.ones(6)).sum().backward()
            optimizer.step()
            for each in model if step == 0 else ():
                each.compile(backend=backend)
        self.assertEqual([coming for coming, _ in seen], 2 * [{2, 3, 4, 5}, {4, 5}, set()])
        self.assertEqual({kind for _, kinds in seen for kind in kinds}, {torch.Tensor, torch.nn.Parameter})

    def test_compiled_code_that_is_not_seen_is_right_all_the_same(self):
        """It asks whether what it reads is a tensor, of the guard's class."""
        torch._dynamo.reset()
        model, optimizer, _ = self.trained()
        weight = model.inner.weight
        doubled = torch.compile(lambda: weight * 2, backend="eager")
        with mock.patch.object(boundaries.guard, "waits", set):
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                optimizer.step()
                had = doubled()
                self.assertNotEqual(self.coming(optimizer), 0)
                self.assertTrue(torch.equal(had, weight * 2))
        torch._dynamo.reset()

    def test_a_state_is_of_a_step_that_has_ended(self):
        model, optimizer, _ = self.trained(full_state=True)
        state = optimizer.state_dict()
        self.assertEqual(state["param_groups"][0]["job_step"], 2)
        self.assertFalse(optimizer._binding.flows.in_step)

    def test_weights_come_also_when_the_optimizer_has_gone(self):
        model, optimizer, expected = self.trained()
        bound = weakref.ref(optimizer._binding)
        del optimizer
        gc.collect()
        loss_of(model, batch(0), seldom=True).backward()
        self.assert_same_weights(model, expected)
        gc.collect()
        self.assertIsNone(bound())

    def test_refusals(self):
        class Last(torch.nn.Parameter):
            def __init_subclass__(cls):
                raise TypeError("nobody is derived from this")

        model = torch.nn.Linear(2, 2)
        model.bias = Last(torch.ones(2))
        with refused(self, ValueError):
            self.optimizer(model, params=list(model.named_parameters()))


class GuardTest(unittest.TestCase):
    """Of a parameter of which old weights are in its memory until somebody waits."""

    NEW = torch.arange(1.0, 10).view(3, 3)

    def guarded(self, own=None):
        parameter = torch.nn.Parameter(torch.zeros(3, 3))
        if own is not None:
            parameter = own(parameter)
        here = parameter.data

        def wait(_=None):
            here.copy_(self.NEW)
            guard.remove(parameter)

        guard.put(parameter, wait, 0, [])
        self.addCleanup(guard.remove, parameter)
        return parameter

    def is_guarded(self, parameter):
        return type(parameter) in guard._own_classes

    def test_whatever_reads_waits(self):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(context, weight):
                return weight * 2

        def without_torch_function(call):
            with torch._C.DisableTorchFunctionSubclass():
                return call()

        def in_mode(call):
            with torch.device("cpu"):
                return call()

        class Other(torch.Tensor):
            pass

        def saved(p):
            file = io.BytesIO()
            torch.save(p, file)
            return torch.load(io.BytesIO(file.getvalue()))

        def filled(p):
            with torch.no_grad():
                return p.add_(1)

        linear = torch.nn.Linear(3, 3, bias=False)
        x = torch.ones(3, 3)
        reads = {
            "p.data": lambda p: p.data, "p.detach()": lambda p: p.detach(), "numpy": lambda p: p.detach().numpy(),
            "clone": lambda p: p.clone(), "item": lambda p: p[2, 1].item(), "tolist": lambda p: p.tolist(),
            "an operator": lambda p: p + 1, "a reflected one": lambda p: 1 - p, "x + p": lambda p: x + p,
            "x @ p": lambda p: x @ p, "-p": lambda p: -p, "p == 9": lambda p: p == 9, "9 < p": lambda p: 8 < p,
            "iteration": lambda p: torch.stack(list(p)), "text": lambda p: repr(p), "in": lambda p: 9.0 in p,
            "format": lambda p: f"{p}", "copy": copy.copy, "deepcopy": copy.deepcopy,
            "pickle": lambda p: pickle.loads(pickle.dumps(p)), "torch.save": saved,
            "a function": lambda p: functional.linear(x, p),
            "its out": lambda p: torch.add(1, p.detach(), out=torch.empty(3, 3)),
            "stack": lambda p: torch.stack([x, p]), "foreach": lambda p: torch._foreach_add([x, p], 1)[1],
            "lerp_": lambda p: torch.zeros(3, 3).lerp_(p, 0.5), "copy_": lambda p: torch.zeros(3, 3).copy_(p),
            "assignment": lambda p: x.clone().index_put((torch.tensor([1]),), p[1]),
            "a dispatched operator": lambda p: torch.ops.aten.mul.Tensor(p, 2),
            "a method of the class": lambda p: torch.Tensor.mul(p, 2),
            "a getter of the class": lambda p: torch.Tensor.data.__get__(p),
            "a function of autograd": Twice.apply,
            "a C++ binding": lambda p: (ctypes.c_float * 9).from_address(torch._C._data_address(p))[8],
            "without torch functions": lambda p: without_torch_function(lambda: torch.mul(x, p)),
            "its method, without": lambda p: without_torch_function(lambda: p.mul(2)),
            "its operator, without": lambda p: without_torch_function(lambda: p * 2),
            "under a mode": lambda p: in_mode(lambda: torch.add(x, p)),
            "beside another class": lambda p: torch.stack([torch.ones(3, 3).as_subclass(Other), p]).as_subclass(
                torch.Tensor),
            "the vector of all": lambda p: torch.nn.utils.parameters_to_vector([p]),
            "functional_call": lambda p: torch.func.functional_call(linear, {"weight": p}, (x,)),
            "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
            "its memory": lambda p: (ctypes.c_float * 9).from_address(p.data_ptr())[8],
            "its storage": lambda p: p.untyped_storage().tolist(),
            "dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())),
            "a state": lambda p: torch.nn.ParameterList([p]).state_dict()["0"],
            "a write": filled, "an attribute": lambda p: getattr(p, "T"),
        }
        for name, read in reads.items():
            with self.subTest(name):
                expected = read(torch.nn.Parameter(self.NEW.clone()))
                parameter = self.guarded()
                had = read(parameter)
                self.assertIs(type(had), type(expected))
                self.assertTrue(torch.equal(torch.as_tensor(had), torch.as_tensor(expected))
                                if isinstance(had, (torch.Tensor, numpy.ndarray)) else had == expected)

    def test_whoever_asks_for_its_kind_gets_the_answer(self):
        for ask in (lambda p: isinstance(p, torch.nn.Parameter), lambda p: isinstance(p, torch.Tensor), torch.is_tensor,
                    lambda p: p.__class__ is torch.nn.Parameter, lambda p: not isinstance(p, DTensor),
                    lambda p: type(p)(torch.ones(2)).__class__ is torch.nn.Parameter):
            self.assertTrue(ask(self.guarded()))

    def test_what_reads_no_weights_does_not_wait(self):
        parameter = self.guarded()
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.ones(1))
        module._parameters["weight"] = parameter
        module._parameters["tied"] = parameter
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.param_groups[0]["params"] = [parameter]
        for clear in (module.zero_grad, optimizer.zero_grad, lambda: setattr(parameter, "grad", None),
                      lambda: delattr(parameter, "grad")):
            parameter.grad = torch.ones(3, 3)
            self.assertEqual(parameter.grad.sum(), 9)
            clear()
            self.assertIsNone(parameter.grad)
        parameter.requires_grad = False
        self.assertFalse(parameter.requires_grad)
        self.assertEqual((parameter.shape, parameter.dtype, parameter.device.type, parameter.is_leaf),
                         ((3, 3), torch.float32, "cpu", True))
        self.assertEqual([name for name, _ in module.named_parameters()], ["weight"])
        self.assertIn(parameter, {parameter: 1})
        self.assertTrue(self.is_guarded(parameter))

    def test_an_error_of_the_wait_is_the_readers_and_the_guard_stays(self):
        parameter = torch.nn.Parameter(torch.zeros(3, 3))

        def fail(_):
            if failed:
                raise ballast.FailedPreconditionError("it has failed before")
            failed.append(True)
            raise ballast.UnavailableError("the service has gone")

        guard.put(parameter, fail, 0, [])
        self.addCleanup(guard.remove, parameter)
        for read in (lambda: parameter.data, lambda: parameter + 1, lambda: functional.linear(torch.ones(3), parameter),
                     lambda: isinstance(parameter, torch.Tensor), lambda: torch.stack([parameter]),
                     lambda: copy.deepcopy(parameter)):
            failed = []
            with self.assertRaisesRegex(ballast.UnavailableError, "has gone"):
                read()
            self.assertTrue(self.is_guarded(parameter))


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
                                            job=f"job{next(_numbers)}",
                                            overlap_weights=overlap_weights, **options)
            for step in range(steps):
                if overlap_weights and step + 1 == steps:
                    optimizer.wait_for_weights()
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
        for index in indices:
            for name, weight in weights(model[index]).items():
                self.assertTrue(torch.equal(weight, expected[f"{index}.{name}"]), name)

    def test_a_forward_begins_before_the_last_weights_are_there(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                model, optimizer, expected = self.trained(overlap=overlap, timeout=30)
                ran = []

                def ran_first(*_):
                    self.assertTrue(self.valve._waits)
                    self.assert_weights(model, expected, [0])
                    ran.append(optimizer._binding.flows.returning.coming)
                    self.valve.open()

                hook = model[0].register_forward_hook(ran_first)
                loss_of_layers(model, 7).backward()
                hook.remove()
                self.assertEqual(ran, [{index for index in range(2, 2 * LAYERS)}])
                self.assert_weights(model, expected)
                optimizer.close()

    def test_zero_grad_does_not_wait(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                model, optimizer, expected = self.trained(overlap=overlap, timeout=30)
                coming = set(optimizer._binding.flows.returning.coming)
                self.assertEqual(coming, set(range(2 * LAYERS)))
                for parameter in model.parameters():
                    parameter.grad = torch.zeros(parameter.shape)
                model.zero_grad()
                optimizer.zero_grad()
                self.assertEqual(optimizer._binding.flows.returning.coming, coming)
                self.assertTrue(self.valve._waits)
                self.valve.open()
                self.assert_weights(model, expected)
                optimizer.close()

    def test_whoever_reads_all_weights_waits_until_the_last_are_there(self):
        for name, read in {"state_dict": lambda model, optimizer: model.state_dict(),
                           "wait_for_weights": lambda model, optimizer: optimizer.wait_for_weights(),
                           "close": lambda model, optimizer: optimizer.close(),
                           "the next step": lambda model, optimizer: optimizer.step()}.items():
            with self.subTest(name):
                model, optimizer, expected = self.trained()
                optimizer._binding.member.session._while_waiting = self.valve.open
                read(model, optimizer)
                self.assertIsNone(self.valve._left)
                self.assert_weights(model, expected)
                optimizer.close()

    def test_nobody_waits_for_the_weights_of_a_model_that_has_gone(self):
        """The memory that they are written to stays until the session is closed."""
        model, optimizer, expected = self.trained()
        session, addresses = weakref.ref(optimizer._binding.member.session), [
            place.data_ptr() for place in optimizer._binding.member.places.places]
        there, close = [], ballast.Session.close

        def closes(session):
            there.append([place.data_ptr() for place in session._memory] == addresses)
            close(session)

        with mock.patch.object(ballast.Session, "close", closes):
            del model, optimizer
            gc.collect()
        self.assertIsNone(session())
        self.assertTrue(there[0])

    def test_an_interrupted_forward_is_done_again(self):
        model, optimizer, expected = self.trained()
        session = optimizer._binding.member.session
        session._while_waiting = lambda: os.kill(os.getpid(), signal.SIGINT)
        with self.assertRaises(KeyboardInterrupt):
            loss_of_layers(model, 7)
        session._while_waiting = self.valve.open
        loss_of_layers(model, 7).backward()
        self.assert_weights(model, expected)
        optimizer.step()

    def test_weights_that_do_not_come_in_time(self):
        model, optimizer, expected = self.trained()
        optimizer._binding.member.session.timeout = 0.2
        with refused(self, ballast.DeadlineError, varies=True):  # By the job's name, as the next one.
            loss_of_layers(model, 7)
        for use in (lambda: loss_of_layers(model, 7), model.state_dict, optimizer.step):
            with refused(self, ballast.FailedPreconditionError, "INTERRUPTED"):
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
        optimizer._binding.member.session.timeout = 0.2
        for read in (lambda: loss_of_layers(model, 7), model.state_dict):
            child = os.fork()  # It waits for them in vain.
            if child == 0:
                reason = "none"
                try:
                    read()
                except ballast.FailedPreconditionError as error:
                    reason = error.reason
                os._exit(0 if reason == "" else 1)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_the_service_dies_while_weights_are_coming(self):
        for overlap in (False, True):
            with self.subTest(overlap=overlap):
                model, optimizer, expected = self.trained(overlap=overlap)
                self.await_committed(optimizer._options.job)
                self.kill(processes.children_of(self.service.process.pid)[0])
                optimizer._binding.member.session._while_waiting = self.valve.open
                loss_of_layers(model, 7).backward()
                self.assert_weights(model, expected)
                optimizer.step()
                self.assertEqual(optimizer._binding.member.step_count, 4)
                optimizer.close()

    def test_the_service_is_gone_for_good(self):
        model, optimizer, _ = self.trained(reconnect_timeout=0.3)
        self.kill(self.service.process.pid)
        self.valve.open()
        with refused(self, ballast.UnavailableError, varies=True):
            loss_of_layers(model, 7)
        for use in (lambda: loss_of_layers(model, 7), model.state_dict, optimizer.step, optimizer.wait_for_weights):
            with refused(self, ballast.FailedPreconditionError, "INTERRUPTED"):
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

    def test_two_ranks(self):
        """The same bits, a hand-made average among them. One rank reads alone its own shards; and, where ranks have
        weights from each other, whatever it likes, since step() has gathered them."""
        cases = [("fsdp", {"overlap": False}), ("fsdp", {"overlap": True, "accumulation": 2}),
                 ("fsdp", {"overlap": True, "update": "speculate"}), ("fsdp", {"overlap": False, "averages": True})]
        *results, of_fsdp, plain_ddp, asked_ddp = self.ranks(
            2, *[(function, options | {"overlap_weights": overlap_weights})
                 for function, options in cases for overlap_weights in (False, True)],
            ("reads_shards_alone", {}),
            *[("reads_replicas_alone", {"overlap_weights": each}) for each in (False, True)])
        for case, without, with_it in zip(cases, results[::2], results[1::2]):
            with self.subTest(case):
                self.assertEqual([digest for digest, _ in with_it], [digest for digest, _ in without])

        self.assertEqual(of_fsdp, [[0] * 10, [0]])
        self.assertEqual(asked_ddp, plain_ddp)
        self.assertEqual([overlaps for *_, overlaps in asked_ddp], [False, False])

    def test_replicas_have_their_weights_when_the_step_returns(self):
        plain, asked = self.ranks(4, *[("fsdp", {"overlap": True, "replicas": 2, "overlap_weights": overlap_weights})
                                       for overlap_weights in (False, True)])
        self.assertEqual(asked, plain)


if __name__ == "__main__":
    unittest.main()
