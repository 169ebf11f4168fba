"""A service on the nodes of a Ray cluster: a `ballastd` on each, in a detached actor.

>>> service = ballast.ray.Service(nodes=2, memory="8GiB", name="gpt")  # In the driver.
>>> optimizer = ballast.torch.AdamW(model.parameters(), service=ballast.ray.node("gpt"), job="gpt")  # In each worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install ballast[ray]") from None

from .. import service
from ..errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from .member import Member, folder_of

_NAMESPACE = "ballast"  # Of the actors' names.
_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ANSWER_SECONDS = 10.0  # A member that is being started again answers within this.


def node(name: str) -> str:
    """In a worker, service= for its optimizers: the members of the service `name`, through that of this node. Sets
    BALLAST_SERVICE and the credentials' variables of this process."""
    if not folder_of(name).exists():
        raise UnavailableError(f"node {ray.util.get_node_ip_address()} has no member of service {name}, which is at "
                               f"{', '.join(Service.get(name).addresses)}: run the workers there, or give it more")
    os.environ["BALLAST_SERVICE"] = address = f"unix:{folder_of(name) / 'socket'}"
    os.environ.update({f"BALLAST_{key.upper()}": file for key, file in service.tls_files(address).items()})
    return "node"


class Service:
    """Starts `ballastd` on this many nodes. It outlives the driver, until `close`. If a process of it ends, Ray starts
    it again on that node, over its memory there: trainings go on, with the same bits.

    memory: of each node, in /dev/shm, for example "8GiB". resources: what Ray reserves there besides, for example
    {"CPU": 4, "accelerator_type:H100": 0.001}. checkpoint_dir, checkpoint_every: as in ballast.Service; all nodes share
    the folder. flags: more of `ballastd`. If it does not serve within `timeout` seconds: an error, and nothing is left.
    Between nodes it has TLS with keys of its own. Ray carries the certificates, so it is as safe as Ray."""

    def __init__(self, nodes: int, memory: str, name: str, *, resources: dict[str, float] | None = None,
                 checkpoint_dir: str | os.PathLike | None = None, checkpoint_every: str | None = None,
                 flags: list[str] | tuple[str, ...] = (), timeout: float = 60.0):
        amount = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])iB", memory)
        if nodes < 1 or amount is None or not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name):
            raise ValueError(f"nodes={nodes}, memory={memory!r}, name={name!r}: expected at least one node, an amount "
                             "such as '8GiB', and a name of at most 40 letters, digits and '_.-'")
        flags = [f"--memory-limit={memory}", *service.saving_flags(checkpoint_dir, checkpoint_every), *flags]
        reserved = {"CPU": 1, "memory": float(amount[1]) * _UNITS[amount[2]], **(resources or {})}
        if not ray.is_initialized():
            ray.init()
        self.name, deadline, members = name, time.monotonic() + timeout, []
        late = f"service {name} does not serve after {timeout:g} s: see `ray list actors`, or give it a longer timeout="
        if self._members():
            raise FailedPreconditionError(f"the Ray cluster has a service {name}: Service.get({name!r}) finds it, and "
                                          "its close() ends it")
        try:
            hosts = _chosen([reserved.copy()] * nodes, deadline)
            options = {"namespace": _NAMESPACE, "lifetime": "detached", "max_restarts": -1, "max_task_retries": -1,
                       "num_cpus": reserved.pop("CPU"), "memory": reserved.pop("memory")}
            for number, host in enumerate(hosts):  # A member's memory stays on its node.
                actor = ray.remote(Member).options(
                    name=f"{name}@{number}", resources={**reserved, f"node:{host}": 0.001}, **options)
                members.append(actor.remote(name, nodes, flags))
            certificates = _answers([member.prepare.remote() for member in members], deadline, late)
            _answers([member.serve.remote(certificates) for member in members], deadline, late)
        except BaseException:
            with contextlib.suppress(Exception):  # The first error counts.
                _end(members)
            raise

    @classmethod
    def get(cls, name: str) -> Service:
        """One that was started before, perhaps by another driver."""
        found = cls.__new__(cls)
        found.name = name
        if not found._members():
            raise UnavailableError(f"the Ray cluster has no service {name}: Service(nodes, memory, {name!r}) starts it")
        return found

    @property
    def addresses(self) -> list[str]:
        """"HOST:PORT" of each member."""
        nodes = ray.nodes()
        lost = {each["NodeManagerAddress"] for each in nodes} - {
            each["NodeManagerAddress"] for each in nodes if each["Alive"]}
        return _answers([member.address.remote() for member in self._members()], time.monotonic() + _ANSWER_SECONDS,
                        f"a member of service {self.name} does not answer (nodes that Ray has lost: "
                        f"{', '.join(lost) or 'none'}): ask again if it is taking over its memory, or start Ray there again; "
                        "otherwise close(save=False), and load the last checkpoint into another service")

    def close(self, *, save: bool = True) -> None:
        """Ends it and frees its memory, after a save of all jobs if it has a checkpoint_dir. End the trainings before: steps
        after the save are lost. If a save fails: an error, and the service stays."""
        members = self._members()
        if save and self.addresses:
            _answers([member.save.remote(len(members)) for member in members])
        _end(members)

    def _members(self) -> list[Any]:
        return [ray.get_actor(each["name"], _NAMESPACE) for each in ray.util.list_named_actors(all_namespaces=True)
                if each["namespace"] == _NAMESPACE and each["name"].rpartition("@")[0] == self.name]


def _chosen(bundles: list[dict[str, float]], deadline: float) -> list[str]:
    """The addresses of nodes that have these resources now."""
    def text(has: dict[str, float]) -> str:
        return ", ".join(f"{has.get(kind, 0):,.10g} {kind}" for kind in bundles[0])

    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        is_there = group.wait(max(deadline - time.monotonic(), 0))
        chosen = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
    finally:
        ray.util.remove_placement_group(group)
    nodes = [each for each in ray.nodes() if each["Alive"]]
    if is_there:
        return [each["NodeManagerAddress"] for each in nodes if each["NodeID"] in chosen]
    has = "; ".join(f"{each['NodeManagerAddress']} has {text(each['Resources'])}" for each in nodes)
    raise ResourceExhaustedError(f"Ray has no {len(bundles)} nodes with {text(bundles[0])} free: {has}, used or free")


def _answers(calls: list[Any], deadline: float | None = None, late: str = "") -> list[Any]:
    """late: the error after the deadline."""
    try:
        return ray.get(calls, timeout=deadline and max(deadline - time.monotonic(), 0))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # One line of the member.
    except ray.exceptions.RayActorError as error:
        raise UnavailableError(str(error).splitlines()[-1]) from None
    except ray.exceptions.GetTimeoutError:
        raise UnavailableError(late) from None


def _end(members: list[Any]) -> None:
    """Those that do not answer, which may be on a lost node, are killed as they are."""
    asked = [member.address.remote() for member in members]
    answered, _ = ray.wait([ray.put(None), *asked], num_returns=1 + len(asked), timeout=_ANSWER_SECONDS)
    ends = [member.end.remote() for member, call in zip(members, asked) if call in answered]
    try:
        _answers(ends)  # Much memory takes long to be given back.
    finally:
        for member in members:
            ray.kill(member)
