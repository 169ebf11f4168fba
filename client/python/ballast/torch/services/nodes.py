"""Which service each rank has on its node, and how the services of several nodes reach each other. Ranks are on one
node if they reach the same service by its unix socket."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import pathlib
import socket
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from ...client import Client
from ...errors import FailedPreconditionError, UnavailableError
from ...service import tls_files
from ...session import Job
from ..peers import Peers
from .own_service import Kept, own_service

NODE = "node"  # As service=: the lasting service of each node.
CLUSTER = "etcd://"  # As its beginning: services of a cluster.
_SOCKET = "unix:/run/ballast/ballastd.sock"  # The packaged service's.
_ANY = {"0.0.0.0": socket.AF_INET, "[::]": socket.AF_UNSPEC}  # Stands for all addresses of a host.


class Node(NamedTuple):
    """What a rank knows of its node: the name for people, a key that the ranks on it have in common, and where other
    nodes reach its service ("HOST:PORT"), or its host; "" if nowhere."""

    name: str
    key: str
    address: str


def kind_of(service: str | None) -> str:
    """What all ranks must have in common. A single service may have another address on each host."""
    is_single = service is not None and service != NODE and "," not in service and not service.startswith(CLUSTER)
    return "a single one" if is_single else str(service)


def lasting(job: Job, rank: int, peers: Peers | None, client_of: Callable[[str], Client]) -> tuple[str, Job]:
    """service="node": where this rank reaches its home, and the job, with members if there are several nodes."""
    said, name = os.environ.get("BALLAST_SERVICE", ""), socket.gethostname()
    client = client_of(said if said.startswith("unix:") else _SOCKET)
    try:
        key, address = client.identity()
    except UnavailableError as error:
        raise UnavailableError(f"node {name}: {error}") from None
    if peers is None:
        return client.service, job
    host, _, port = address.rpartition(":")
    own = _own_host(peers, _ANY.get(host, socket.AF_UNSPEC))
    if host in _ANY:
        address = own and address_of(own, port)
    members, homes = homes_of(_gather(peers, "nodes", Node(name, key, address)), "start it with "
                              "--listen=HOST:PORT,unix:PATH, and --advertise=HOST:PORT if others reach it elsewhere")
    if not members:
        return client.service, job
    recorded = peers.from_first("recorded homes", _recorded(client, job, members) if rank == 0 else None)
    if recorded:
        members, homes = json.loads(recorded)
    job = dataclasses.replace(job, members=members, homes=homes)
    return _home(job, rank, client.service, address, name), job


def _home(job: Job, rank: int, service: str, address: str, node: str) -> str:
    """Where this rank reaches its home. service, address: how it reaches the service of its node, and others do."""
    home = job.members[job.homes[rank]]
    if home == address:
        return service
    warnings.warn(f"the part of rank {rank} of job {job.name} is at {home}, and the rank is on {node} now: gradients and "
                  "weights go over the network", stacklevel=3)
    return home


def _recorded(client: Client, job: Job, members: list[str]) -> str:
    """Members and homes, as JSON, of the job if it exists on these members. An earlier run may have had its ranks on
    other nodes. "": it does not."""
    for found in client.jobs():
        recorded = [member["address"] for member in found["members"]]
        if (found["name"], found["world_size"]) == (job.name, job.world_size) and sorted(recorded) == sorted(members):
            return json.dumps([recorded, found["homes"]])
    return ""


def started(job: Job, rank: int, peers: Peers | None, kept: Kept,
            loaded: tuple[str, int] | None) -> tuple[str, Job, dict[str, str]]:
    """service=None: the same on services of this run, one a node, which its first rank starts. There the job may get
    another name. Also the credentials for the services of other nodes. loaded: of a state with moments, the uid and step
    of its job, if it has one. Then a job that ranks before a restart have left elsewhere is closed."""
    if kept.service is not None:
        kept.service.check()
    remedy = "set MASTER_ADDR to a host's address in the network of the nodes"
    own = "" if peers is None else _own_host(peers)
    nodes = joined(_gather(peers, "nodes", Node(socket.gethostname(), " ".join(_places_of_sockets()), own)))
    firsts = _firsts(nodes)
    _check_reach(nodes, remedy)
    said, spreads = None, len(firsts) > 1

    def exchange(own_certificate: str | None) -> list[str]:
        return [each for each in peers.gather("certificates", own_certificate) if each is not None]

    if rank in firsts:
        if kept.service is None:
            kept.service = own_service(own if spreads else None, exchange)
        elif spreads:
            kept.service.trust(exchange)
        if rank == 0:
            kept.service.close_earlier()
        said = [kept.service.address, kept.service.address_for_others, kept.service.free_name(kept, job.name),
                kept.service.left()]
    elif spreads:
        exchange(None)
    services = [said] if peers is None else peers.gather("services", said)
    name = max((services[first][2] for first in firsts), key=lambda name: (len(name), name))  # Free on all.
    of_rank = [services[int(node.key)] for node in nodes]
    members, homes = homes_of([node._replace(address=of[1]) for node, of in zip(nodes, of_rank)], remedy)
    job = dataclasses.replace(job, name=name, members=members, homes=homes)
    left = [[found for found in services[first][3] if found["name"] == name] for first in firsts]  # By node.
    if any(left) and goes_on(job, left, loaded):
        job = dataclasses.replace(job, members=left[0][0]["members"], homes=left[0][0]["homes"])
    elif any(left):
        for found in left[firsts.index(rank)] if rank in firsts else ():
            Client(found["service"]).close_job(name, force=True, here=True)
        if peers is not None:
            peers.meet("what was left is closed")
    if rank in firsts:
        kept.service.take_name(kept, name)
    address, address_for_others = of_rank[rank][:2]
    if not spreads:
        return address, job, {}
    return _home(job, rank, address, address_for_others, nodes[rank].name), job, tls_files(address)


def goes_on(job: Job, left: list[list[dict[str, Any]]], loaded: tuple[str, int] | None) -> bool:
    """Whether these ranks go on with the job that ranks before them have left on their nodes. If not, it is closed. loaded:
    see started. FailedPreconditionError if neither can be: what would be lost was not loaded."""
    found = [each for of_node in left for each in of_node]
    uid, step = found[0]["uid"], max(each["committed_step"] for each in found)
    if any(each["world_size"] != job.world_size for each in found):
        why = f"its world size is {found[0]['world_size']}, and that of the ranks is now {job.world_size}"
    elif any([each["uid"] for each in of_node] != [uid] for of_node in left) or (
            sorted(found[0]["members"]) != sorted(job.members)):
        why = "a part of it has ended with the service of its node"
    else:
        return loaded is None or loaded == (uid, step)
    if loaded is None and any(each["phase"] != "AWAITING_WEIGHTS" for each in found):
        raise FailedPreconditionError(f"job {job.name} cannot go on from step {step}, because {why}: load_state_dict() of your "
                                      "own checkpoint begins a new job, and lasting services with a --checkpoint-dir load "
                                      "theirs")
    return False


def _gather(peers: Peers | None, what: str, node: Node) -> list[Node]:
    return [node] if peers is None else [Node(*each) for each in peers.gather(what, node)]


def joined(nodes: list[Node]) -> list[Node]:
    """Of nodes with the words of _places_of_sockets as keys: now the key is the first rank of those that share a place."""
    firsts: dict[int, set[str]] = {}
    keys = []
    for rank, node in enumerate(nodes):
        places = set(node.key.split())
        keys.append(next((first for first, others in firsts.items() if places & others), rank))
        firsts.setdefault(keys[-1], places)
    return [node._replace(key=str(key)) for node, key in zip(nodes, keys)]


def homes_of(nodes: list[Node], remedy: str) -> tuple[list[str], list[int]]:
    """The members' addresses and each rank's home, from the nodes of the ranks; rank 0's home is the first. Both empty
    if all are on one node. FailedPreconditionError, with the remedy: others cannot reach a node's service."""
    firsts = _firsts(nodes)
    if len(firsts) == 1:
        return [], []
    _check_reach(nodes, remedy)
    keys, members = [nodes[first].key for first in firsts], [nodes[first].address for first in firsts]
    for number, address in enumerate(members):
        if members.index(address) != number:
            one, other = nodes[firsts[members.index(address)]], nodes[firsts[number]]
            raise FailedPreconditionError(f"nodes {one.name} and {other.name} both say that their service is at {address}: "
                                          f"{remedy}")
    return members, [keys.index(node.key) for node in nodes]


def _firsts(nodes: list[Node]) -> list[int]:
    """The first rank of each node."""
    keys = [node.key for node in nodes]
    return [rank for rank, key in enumerate(keys) if key not in keys[:rank]]


def _check_reach(nodes: list[Node], remedy: str) -> None:
    firsts = _firsts(nodes)
    for first in firsts if len(firsts) > 1 else ():
        node, other = nodes[first], nodes[firsts[first == 0]]
        if not node.address:
            raise FailedPreconditionError(f"node {other.name} (rank {firsts[first == 0]}) cannot reach the service of node "
                                          f"{node.name} (rank {first}), which has no address in a network: {remedy}")
        if is_loopback(node.address):
            raise FailedPreconditionError(f"node {other.name} (rank {firsts[first == 0]}) cannot reach the service of node "
                                          f"{node.name} (rank {first}) at {node.address}, a loopback address: {remedy}")


def is_loopback(address: str) -> bool:
    """Of "HOST:PORT" or an address without port."""
    host = address.rpartition(":")[0].strip("[]") if address.count(":") == 1 or "]" in address else address
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_host(peers: Peers, family: int = socket.AF_UNSPEC) -> str:
    """This node's address towards the host where the ranks meet; on that host itself, towards another. "": it has
    none."""
    own = host_towards(peers.meeting_host, family)
    others = peers.gather("hosts", own)
    ways = (host_towards(other, family) for other in others if other and not is_loopback(other))
    return own if own and not is_loopback(own) else next((way for way in ways if way), own)


def host_towards(host: str, family: int = socket.AF_UNSPEC) -> str:
    """The address from which this host sends to another one; "" if it does not. Nothing is sent."""
    with contextlib.suppress(OSError):
        for of_family, kind, protocol, _, name in socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), socket.socket(of_family, kind, protocol) as way:
                way.connect(name)
                return way.getsockname()[0]
    return ""


def _places_of_sockets() -> list[str]:
    """Processes that have one of these in common see each other's unix sockets in the folder for temporary files: the
    tree of files, and that folder, which containers may share."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [f"{boot}/{kind}/{facts.st_dev}/{facts.st_ino}" for kind, facts in (
        ("tree", os.stat("/proc/self/ns/mnt")), ("folder", os.stat(tempfile.gettempdir())))]
