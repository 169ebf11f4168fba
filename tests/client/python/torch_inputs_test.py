#!/usr/bin/env python3
"""The inputs with which PyTorch tests its own optimizers, ours against torch.optim: the values the same, the errors
of the same kinds."""

import copy
import inspect
import pathlib
import sys
import types
import unittest
import warnings

import torch

# torch's module wants it for a base class of tests, which are none of these.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
from torch.testing._internal import common_optimizers  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "client/python"))

import ballast  # noqa: E402
import ballast.torch  # noqa: E402

TOLERANCE = 1e-6
# What torch tries and ours refuses. It says so when it is made, and not later.
REFUSED = {"differentiable": "autograd does not go through the service"}
# Of torch's flags of an implementation: accepted, because there is one implementation only.
ACCEPTED = ("foreach", "fused", "capturable")
# Of torch's tests of an optimizer as a whole, not of single inputs.
NOT_APPLICABLE = {"supports_complex": "complex parameters are refused when the optimizer is made",
                  "supports_sparse": "all refuse sparse gradients, as torch's AdamW and Adam do",
                  "only_supports_sparse_grads": "the same",
                  "supports_multiple_devices": "CI has no second device",
                  "step_requires_closure": "a closure is optional, as in torch"}

KINDS = ("AdamW", "Adam", "SGD", "Adagrad")
INFOS = {info.optim_cls.__name__: info for info in common_optimizers.optim_db}


def parameters():
    generator = torch.Generator().manual_seed(2)
    shapes = {"matrix": (5, 7), "vector": (9,), "scalar": (), "one": (1, 1), "none": (0, 3), "long": (3, 300)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


class InputsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(1)
        cls.service = ballast.Service(memory_limit="1GiB")
        cls.addClassCleanup(cls.service.stop)

    def make(self, kind, params, kwargs, job):
        optimizer = getattr(ballast.torch, kind)(params, service=self.service.address, job=job, **kwargs)
        self.addCleanup(optimizer.close)
        return optimizer

    def compare(self, kind, kwargs, job, groups=lambda named: named):
        """The trajectories, with a gradient that is missing now and then."""
        ours, theirs = parameters(), parameters()
        mine = self.make(kind, groups(list(ours.items())), copy.deepcopy(kwargs), job)
        # torch itself takes capturable on an accelerator alone.
        of_reference = {name: value for name, value in kwargs.items() if name != "capturable"}
        reference = getattr(torch.optim, kind)(groups(list(theirs.items())), **copy.deepcopy(of_reference))
        generator = torch.Generator().manual_seed(3)
        for step in range(8):
            for name in ours:
                gradient = torch.randn(ours[name].shape, generator=generator)
                for side in (ours, theirs):
                    side[name].grad = None if name == "vector" and step in (0, 3) else gradient.clone()
            mine.step()
            reference.step()
            for name in ours:
                bound = TOLERANCE * theirs[name].abs().max().item() if theirs[name].numel() else 0
                far = (ours[name] - theirs[name]).abs().max().item() if theirs[name].numel() else 0
                self.assertLessEqual(far, bound, (name, step))

    def test_every_input_of_torchs(self):
        tried = 0
        for kind in KINDS:
            for device in ("cpu", "cuda"):  # The second only has more arguments.
                for number, given in enumerate(INFOS[kind].optim_inputs_func(device=device)):
                    with self.subTest(kind=kind, desc=given.desc):
                        self.assertIsNone(given.params)
                        refused = [name for name in REFUSED if given.kwargs.get(name)]
                        if refused:
                            with self.assertRaisesRegex(ValueError, refused[0]):
                                getattr(ballast.torch, kind)(list(parameters().items()), **given.kwargs)
                            without = {name: value for name, value in given.kwargs.items() if name not in REFUSED}
                        else:
                            without = given.kwargs
                        self.compare(kind, without, f"{kind}-{device}-{number}")
                        tried += 1
        self.assertGreaterEqual(tried, 2 * (5 + 10) + 2 * (9 + 7))

    def test_flags_of_an_implementation(self):
        for kind in KINDS:
            self.assertLessEqual(set(INFOS[kind].supported_impls), {*ACCEPTED, *REFUSED})
            for flag in ACCEPTED:
                if flag not in inspect.signature(getattr(torch.optim, kind)).parameters:
                    continue
                with self.subTest(kind=kind, flag=flag):
                    self.compare(kind, {flag: True, "weight_decay": 0.1}, f"{kind}-{flag}")
            with self.assertRaisesRegex(ValueError, "differentiable"):
                getattr(ballast.torch, kind)(list(parameters().items()), differentiable=True)

            with self.assertRaises(RuntimeError) as theirs:
                getattr(torch.optim, kind)(parameters().values(), foreach=True, fused=True)
            with self.assertRaises(RuntimeError) as ours:
                getattr(ballast.torch, kind)(list(parameters().items()), foreach=True, fused=True)
            self.assertEqual(str(ours.exception), str(theirs.exception))

    def test_decoupled_weight_decay(self):
        self.compare("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.3, "lr": 0.1}, "decoupled")

    def test_states_of_older_torch(self):
        """Whose param groups lack what came later: then it has torch's default, and not the optimizer's value."""
        others = {"AdamW": {"amsgrad": True}, "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9, "nesterov": True}}
        for kind in KINDS:
            ours, theirs = parameters(), parameters()
            reference = getattr(torch.optim, kind)(theirs.values(), lr=0.1, weight_decay=0.3)
            mine = self.make(kind, list(ours.items()), {"maximize": True, **others.get(kind, {})}, f"old-{kind}")
            for step in range(2):
                for name, parameter in theirs.items():
                    parameter.grad = torch.full_like(parameter, 0.5)
                reference.step()
            state = reference.state_dict()
            for name in ("maximize", "foreach", "capturable", "differentiable", "fused", "amsgrad",
                         "decoupled_weight_decay", "nesterov"):
                state["param_groups"][0].pop(name, None)
            mine.load_state_dict(state)
            for side, optimizer in ((ours, mine), (theirs, reference)):
                for name, parameter in side.items():
                    parameter.data = theirs[name].data.clone()
                    parameter.grad = torch.full_like(parameter, 0.25)
                optimizer.step()
            for name in ours:
                if ours[name].numel():
                    self.assertLess((ours[name] - theirs[name]).abs().max().item(), 1e-6, name)

    def test_options_of_a_group(self):
        def groups(named):
            return [dict(params=named[:2], lr=0.1, betas=(0.5, 0.8)),
                    dict(params=named[2:], eps=1e-4, weight_decay=0.3)]

        for kind in KINDS:
            self.assertTrue(INFOS[kind].supports_param_groups)
            self.compare(kind, {"lr": 0.01}, f"{kind}-groups", groups)

    def test_every_error_input_of_torchs(self):
        tried = 0
        for kind in KINDS:
            for given in INFOS[kind].optim_error_inputs_func(device="cpu", dtype=torch.float32):
                with self.subTest(kind=kind, desc=given.optimizer_error_input.desc):
                    params, kwargs = with_names(given.optimizer_error_input.params), given.optimizer_error_input.kwargs
                    make = getattr(ballast.torch, kind)
                    if given.error_on is not common_optimizers.OptimizerErrorEnum.CONSTRUCTION_ERROR:
                        self.fail("torch has errors of another time now")
                    if issubclass(given.error_type, Warning):
                        with self.assertWarnsRegex(given.error_type, given.error_regex):
                            make(params, **kwargs)
                    else:
                        with self.assertRaisesRegex(given.error_type, given.error_regex) as ours:
                            make(params, **kwargs)
                        with self.assertRaises(given.error_type) as theirs:
                            getattr(torch.optim, kind)(with_names(given.optimizer_error_input.params), **kwargs)
                        self.assertEqual(type(ours.exception), type(theirs.exception))
                    tried += 1
        self.assertGreaterEqual(tried, 2 * 12 + 2 * 7)

    def test_what_does_not_apply_is_refused_or_as_in_torch(self):
        for kind in KINDS:
            info = INFOS[kind]
            for name in NOT_APPLICABLE:
                self.assertTrue(hasattr(info, name), name)
            self.assertEqual(info.supports_sparse, kind in ("SGD", "Adagrad"))
            self.assertFalse(info.only_supports_sparse_grads or info.step_requires_closure)
            make = getattr(ballast.torch, kind)
            with self.assertRaisesRegex(ValueError, "complex"):
                make([("z", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)))])
            sparse = torch.nn.Parameter(torch.zeros(5))
            optimizer = self.make(kind, [("sparse", sparse)], {}, f"{kind}-sparse")
            sparse.grad = torch.sparse_coo_tensor([[0]], [1.0], (5,))
            with self.assertRaisesRegex(RuntimeError, "sparse") as ours:
                optimizer.step()
            if not info.supports_sparse:
                with self.assertRaisesRegex(RuntimeError, "sparse") as theirs:
                    getattr(torch.optim, kind)([sparse]).step()
                self.assertIsInstance(ours.exception, type(theirs.exception))

    # ------------------------------------------------------------ an optimizer as torch's machinery sees it

    def test_hooks_are_called(self):
        named = parameters()
        optimizer = self.make("AdamW", list(named.items()), {}, "hooks")
        called = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before the step"))
        optimizer.register_step_post_hook(lambda *_: called.append("after the step"))
        optimizer.register_state_dict_pre_hook(lambda *_: called.append("state"))
        optimizer.step()
        optimizer.state_dict()
        self.assertEqual(called, ["before the step", "after the step", "state"])

    def test_no_gradients_and_zero_gradients(self):
        for kind, zero in (("AdamW", False), ("Adam", True)):
            named = parameters()
            before = {name: p.detach().clone() for name, p in named.items()}
            optimizer = self.make(kind, list(named.items()), {}, f"nothing-{kind}")
            for p in named.values():
                p.grad = torch.zeros_like(p) if zero else None
            optimizer.step()
            for name, p in named.items():
                self.assertTrue(torch.equal(p, before[name]), name)

    def test_a_copy_is_unbound(self):
        named = parameters()
        optimizer = self.make("AdamW", list(named.items()), {"lr": 0.5}, "copied")
        optimizer.step()
        copied = copy.deepcopy(optimizer)
        self.addCleanup(copied.close)
        self.assertEqual(copied.param_groups[0]["lr"], 0.5)
        self.assertIsNone(copied.grad_norm)
        copied.step()  # It knows of which job and step its state is.
        self.assertEqual(copied.param_groups[0]["job_step"], 2)
        optimizer_of_none = copy.deepcopy(self.make("AdamW", list(parameters().items()), {}, "unmade"))
        self.addCleanup(optimizer_of_none.close)
        optimizer_of_none.step()

    def test_a_parameter_with_two_names_is_one(self):
        ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = self.make("AdamW", [("a", ours), ("tied", ours)], {"lr": 0.1}, "tied")
        reference = torch.optim.AdamW([theirs], lr=0.1)
        for _ in range(3):
            ours.grad, theirs.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
            optimizer.step()
            reference.step()
            self.assertAlmostEqual(optimizer.grad_norm, 0.5 * 3 ** 0.5, places=6)  # Of one, and not of two.
        self.assertLess((ours - theirs).abs().max().item(), TOLERANCE)


def with_names(params):
    """What torch gives without names, with names: the service keeps state by name."""
    if params is None:
        return list(parameters().items())
    if isinstance(params, torch.Tensor):
        return params
    if all(isinstance(entry, torch.Tensor) for entry in params):
        return [(f"p{index}", entry) for index, entry in enumerate(params)]
    if all(isinstance(entry, dict) and isinstance(entry["params"], torch.Tensor) for entry in params):
        return [dict(entry, params=[(f"g{index}", entry["params"])]) for index, entry in enumerate(params)]
    return [dict(entry) if isinstance(entry, dict) else entry for entry in params]


if __name__ == "__main__":
    unittest.main()
