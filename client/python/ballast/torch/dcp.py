"""Adapts torch.distributed.checkpoint to the optimizers' state.

It loads into an existing state of the optimizer, and each entry must be in the checkpoint. A checkpoint of
torch.optim lacks Ballast's own entries: these do not change. `step` is one of them if the rules do not count."""

from __future__ import annotations

import functools
import re
import sys

from ..rules import RULES

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_PLANNER = "torch.distributed.checkpoint.default_planner"
# By the path of an entry in the flat state: marks an optimizer of Ballast, and its own entries.
_MARK = re.compile(r"(.*\.|)param_groups\..*\.job_uid")
_OURS = re.compile(r"param_groups\..*\.(job_uid|job_step|rule|state|state_fallback|param_names(\.\d+)?)"
                   r"|state\..*\.(master|step)")


def asks() -> bool:
    """Whether it calls the caller."""
    return sys._getframe(2).f_globals.get("__name__") == _STATE_DICT


def load_without_ours() -> None:
    """Takes effect once it is imported."""
    planner = getattr(sys.modules.get(_PLANNER), "DefaultLoadPlanner", None)
    if planner is not None and not hasattr(planner.create_local_plan, "__wrapped__"):
        planner.create_local_plan = _leaving_ours(planner.create_local_plan)


def _leaving_ours(original):
    @functools.wraps(original)
    def create_local_plan(self):
        saved = set() if self.metadata is None else self.metadata.state_dict_metadata
        for optimizer in {match[1] for match in map(_MARK.fullmatch, self.state_dict) if match}:
            ours = [key for key in self.state_dict
                    if key.startswith(optimizer) and _OURS.fullmatch(key.removeprefix(optimizer))]
            counts = any(RULES[self.state_dict[key]].counts for key in ours if key.endswith(".rule"))
            for key in ours:
                if key in saved or (counts and key.endswith(".step")):
                    continue
                del self.state_dict[key]
                if key.endswith((".master", ".step")):  # The model has the weights.
                    _remove(self.original_state_dict, self.mappings.get(key, (key,)))
        return original(self)

    return create_local_plan


def _remove(state, path) -> None:
    for step in path[:-1]:
        state = state[step]
    del state[path[-1]]
