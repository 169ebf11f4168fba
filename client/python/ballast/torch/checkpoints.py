"""Converts between a service's checkpoints and what torch saves. Pickles are never executed: files are read with
torch.load(weights_only=True), or as safetensors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import pathlib
import pickle
import re
import secrets
import shutil
import struct
import time
import warnings
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BallastError, FailedPreconditionError, InvalidArgumentError, NotFoundError
from ..session import PLANES, HyperParameters
from .description import Described
from .groups import check_trained_with, hyper_parameters_of
from .moments import updates_in
from .packed import GROUP, SCALES, shape_of, values_of

if TYPE_CHECKING:
    from .remote import Remote

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_LOCK = "lock"  # In a checkpoint that is being written.
_VERSION = re.compile(r"step-\d+\.\d+(\.\d+)?")  # A checkpoint's name.
State = "dict[str, Any] | str | os.PathLike"


def to_checkpoint(folder: str | os.PathLike, optimizer: Remote, model_state: State,
                  optimizer_state: State | None = None) -> pathlib.Path:
    """Writes a checkpoint that a service loads, FOLDER/step-STEP.0, and returns its path. If the folder is DIR/JOB
    under a service's --checkpoint-dir, `ballast load JOB` and --resume=JOB find it.

    optimizer: the one that will continue with it, with its model's parameters and groups; it must not be bound yet.
    model_state: a state_dict of the model, or a file of torch.save or safetensors. optimizer_state: of the optimizer of
    torch.optim of the same name over the same parameters in the same groups and order, or torch.save's file of it;
    without it moments are as before a first update. A file may have the states under the names "model" and
    "optimizer"."""
    weights = _of(_read(model_state), "model")
    moments = None if optimizer_state is None else _of(_read(optimizer_state), "optimizer")
    settings, loaded_of, orders = [], [], []
    for index, group in enumerate(optimizer.param_groups):
        loaded = None if moments is None else _group_of(moments, index, len(optimizer.param_groups))
        if loaded is not None:
            check_trained_with(f"param group {index}", loaded, group)
        values = hyper_parameters_of({**group, **(loaded or {})})
        if loaded is not None and len(loaded["params"]) != len(group["params"]):
            raise FailedPreconditionError(f"param group {index} has {len(loaded['params'])} parameters in the "
                                          f"optimizer's state and {len(group['params'])} in the optimizer")
        order = (loaded or {}).get("param_names") or group["param_names"]
        if sorted(order) != sorted(group["param_names"]):
            raise FailedPreconditionError(f"param group {index} has other parameters in the optimizer's state than in "
                                          "the optimizer")
        settings.append(values)
        loaded_of.append(loaded)
        orders.append(order)
    described = Described(optimizer.param_groups, settings)
    groups = [{"name": group.name, "hyper_parameters": json_of(group.hyper_parameters)} for group in described.groups]
    names = ["master", *(plane for group in described.groups for plane in group.hyper_parameters.planes)]
    parameters, planes, step = [], {plane: {} for plane in names}, 0
    for index, parameter in described.trained.items():
        name, group = described.names[index], described.specs[index].group
        source = described.source[group]
        if name not in weights:
            raise FailedPreconditionError(f"the model's state has no parameter {name}")
        _put(planes["master"], name, weights[name], parameter)
        of_torch = {} if moments is None else moments["state"].get(
            loaded_of[source]["params"][orders[source].index(name)], {})
        settings_of = described.groups[group].hyper_parameters
        count = updates_in(name, of_torch, settings_of.rule)
        step = max(step, count)
        for plane, initial in settings_of.planes.items():
            if count > 0 and of_torch.get(plane) is None:
                raise FailedPreconditionError(f"the optimizer's state has no {plane} of {name}")
            _put(planes[plane], name, of_torch[plane] if count > 0 else torch.full(parameter.shape, initial), parameter)
        parameters.append({"name": name, "shape": list(parameter.shape), "group": groups[group]["name"],
                           "elements": parameter.numel(), "update_count": count})
    index = index_of(pathlib.Path(folder).name, step, groups, parameters)
    return write(pathlib.Path(folder), index, planes.items())


def from_checkpoint(checkpoint: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None) \
        -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """The weights of a checkpoint in fp32, by parameter: for model.load_state_dict(..., strict=False) or
    safetensors.torch.save_file. The checkpoint is FOLDER/step-STEP.GENERATION, or the newest in FOLDER. With an
    `optimizer` of torch.optim (or ballast.torch) over named parameters it also returns what its load_state_dict
    takes: an Adam for an Adam's checkpoint, an AdamW for an AdamW's, an SGD for an SGD's. Checksums are checked. In a
    FOLDER a checkpoint with a damaged index, or a renamed one, is skipped with a warning."""
    folder = _newest_of(pathlib.Path(checkpoint))
    index = _read_index(folder)
    files: dict[str, list[tuple[dict[str, Any], dict[str, torch.Tensor]]]] = {}
    for file in index["files"]:
        path = folder / file["name"]
        if not path.is_file() or _crc32(path) != file["crc32"]:
            raise FailedPreconditionError(f"{path} does not match the checksum in index.json; use another checkpoint")
        files.setdefault(file["plane"], []).append((file, _read_safetensors(path)))
    stored = {plane: _read_plane_files(index, plane, of_plane) for plane, of_plane in files.items()}
    planes = {plane: {parameter["name"]: values_of(stored, parameter, plane) for parameter in index["parameters"]
                      if parameter["name"] in stored[plane]} for plane in stored.keys() & PLANES.keys()}
    if optimizer is None:
        return planes["master"], None
    state = torch.optim.Optimizer.state_dict(optimizer)
    saved = {parameter["name"]: parameter for parameter in index["parameters"]}
    groups = {group["name"]: group["hyper_parameters"] for group in index["groups"]}
    state["state"] = {}
    for group in state["param_groups"]:
        if "param_names" not in group:
            raise InvalidArgumentError("a checkpoint has parameters by name: make the optimizer of "
                                       "model.named_parameters()")
        for number, name in zip(group["params"], group["param_names"]):
            if name not in saved:
                continue
            values = groups[saved[name]["group"]]
            check_trained_with(name, values, group)
            settings = HyperParameters.of_fields(values)
            group.update({key: value for key, value in vars(settings).items() if value is not None and key in group})
            if saved[name]["update_count"] > 0:
                state["state"][number] = {"step": torch.tensor(float(saved[name]["update_count"]))} | {
                    plane: planes[plane][name] for plane in settings.planes}
    return planes["master"], state


# ---------------------------------------------------------------- other formats


def _read(state: State) -> dict[str, Any]:
    if isinstance(state, dict):
        return state
    path = pathlib.Path(state)
    if not path.exists():
        raise NotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InvalidArgumentError(f"{path} is no file of torch.save with tensors and plain values alone, and nothing "
                                   f"else is read: {str(error).splitlines()[0]}") from None
    if not isinstance(read, dict):
        raise InvalidArgumentError(f"{path} has a {type(read).__name__}, not a state_dict")
    return read


def _of(state: dict[str, Any], name: str) -> dict[str, Any]:
    inside = state.get(name)
    return inside if isinstance(inside, dict) else state


def _group_of(state: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    if "param_groups" not in state or "state" not in state:
        raise InvalidArgumentError("the optimizer's state has no param_groups: give torch.optim's state_dict()")
    if len(state["param_groups"]) != count:
        raise FailedPreconditionError(f"the optimizer's state has {len(state['param_groups'])} param groups, and the "
                                      f"optimizer {count}")
    return state["param_groups"][index]


def _put(plane: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise FailedPreconditionError(f"{name} has shape {list(tensor.shape)} in the state and "
                                      f"{list(parameter.shape)} in the model")
    values = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if not bool(torch.isfinite(values).all()):
        raise InvalidArgumentError(f"{name} has a value that is not finite in the state")
    plane[name] = values


def _read_safetensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size - 8, 100_000_000):
            raise InvalidArgumentError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise InvalidArgumentError(f"{path} is not a safetensors file") from None
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in _DTYPES:
                continue
            begin, end = entry["data_offsets"]
            dtype, elements = _DTYPES[entry["dtype"]], math.prod(entry["shape"])
            file.seek(8 + length + begin)
            data = bytearray(file.read(max(end - begin, 0)))
            if len(data) != elements * dtype.itemsize:
                raise InvalidArgumentError(f"{path} is damaged: the offsets of tensor {name} do not fit")
            values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            tensors[name] = values.reshape(entry["shape"])
    return tensors


# ---------------------------------------------------------------- Ballast's format


def index_of(job: str, step: int, groups: list[dict[str, Any]], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """The index of a new checkpoint; `write` adds the files."""
    return {"format": "ballast-checkpoint", "version": 1, "job": job, "uid": secrets.token_hex(16), "step": step,
            "epoch": 1, "generation": 0, "saved_unix_ms": time.time_ns() // 1_000_000, "asked_for": True, "trainer_state": "",
            "last_step": None, "groups": groups, "parameters": parameters}


def json_of(values: HyperParameters) -> dict[str, Any]:
    return {"rule": values.rule, **values.fields()}


def _crc32(path: pathlib.Path) -> str:
    crc32 = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc32 = zlib.crc32(piece, crc32)
    return f"{crc32:08x}"


def _sign(index: dict[str, Any]) -> str:
    """As the service does: keys sorted, no spaces."""
    text = json.dumps({key: value for key, value in index.items() if key != "sha256"}, sort_keys=True,
                      separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _newest_of(folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint's own folder. Or, in a folder of checkpoints, the newest of the job that saved last, in the
    service's order. Checkpoints that no service would load are skipped with a warning."""
    found, saved = [], {}
    for path in sorted(folder.glob("step-*")):
        if not _VERSION.fullmatch(path.name):
            continue
        try:
            index = _read_index(path)
        except (BallastError, OSError) as error:
            warnings.warn(f"passed over: {error}", stacklevel=3)
            continue
        uid, at = index["uid"], index["saved_unix_ms"]
        saved[uid] = max(saved.get(uid, 0), at)
        found.append((index.get("epoch", 1), uid, index["generation"], index["step"], at, path))
    return max(found, key=lambda one: (one[0], saved[one[1]], *one[1:]))[-1] if found else folder


def _epoch_in(folder: pathlib.Path) -> int:
    """Of the newest checkpoint there; 1: there is none. In a cluster each job of a name has a higher one."""
    epochs = [1]
    for path in folder.glob("step-*/index.json"):
        with contextlib.suppress(OSError, ValueError):
            epochs.append(int(json.loads(path.read_text()).get("epoch", 1)))
    return max(epochs)


def _read_index(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / "index.json"
    if path.is_symlink() or not path.is_file():
        raise NotFoundError(f"there is no checkpoint in {folder}: it has no index.json; name FOLDER/step-STEP.GENERATION")
    try:
        index = json.loads(path.read_text())
        version = index["version"] if index["format"] == "ballast-checkpoint" else None
    except (ValueError, KeyError, TypeError):
        raise FailedPreconditionError(f"{path} is not the index of a Ballast checkpoint") from None
    if version != 1:
        raise FailedPreconditionError(f"{path} has format version {version}, this package reads 1")
    if index.get("sha256") != _sign(index):
        raise FailedPreconditionError(f"{path} does not match its own checksum; use another checkpoint")
    name = f"step-{index['step']}.{index['generation']}"
    if _VERSION.fullmatch(folder.name) and not f"{folder.name}.".startswith(f"{name}."):
        raise FailedPreconditionError(f"{folder} was renamed: its index calls it {name}; rename it back")
    return index


def _read_plane_files(index: dict[str, Any], stored: str,
                      files: list[tuple[dict[str, Any], dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """What is stored of a plane, from its files. Where several services have written them, "cut" says which elements of a tensor a file has:
    runs of [begin, elements, count, stride], count pieces of so many elements, each one stride behind the one before."""
    shapes = {parameter["name"]: shape_of(parameter, stored) for parameter in index["parameters"]}
    group = GROUP if stored in SCALES else 1
    plane, left = {}, {}
    for file, tensors in files:
        for name, values in tensors.items():
            if name not in file.get("cut", {}):
                plane[name] = values
                continue
            whole, at = plane.setdefault(name, values.new_zeros(shapes[name])), 0
            for begin, elements, count, stride in file["cut"][name]:
                begin, elements, stride = begin // group, math.ceil(elements / group), stride // group
                pieces = values[at:at + elements * count].view(count, elements)
                whole.as_strided((count, elements), (stride or elements, 1), begin).copy_(pieces)
                at += elements * count
            left[name] = left.get(name, whole.numel()) - at
    for name, elements in left.items():
        if elements != 0:
            raise FailedPreconditionError(f"the files do not have {name} as index.json describes it; use another checkpoint")
    for name, shape in shapes.items():
        if 0 in shape:  # No file has it, where several services have written.
            plane.setdefault(name, torch.zeros(shape, dtype=torch.float32))
    return plane


def _write_safetensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())


def _make_partial(path: pathlib.Path) -> tuple[pathlib.Path, int]:
    """PATH.partial-RANDOM, and its lock: a service that saves in the same folder removes unlocked ones."""
    while True:
        partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
        partial.mkdir()
        try:
            lock = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # The service was faster.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (partial / _LOCK).exists():
                return partial, lock
        except BlockingIOError:  # The service is about to remove it.
            pass
        except OSError:  # Locks do not work there, and nothing is removed.
            return partial, lock
        os.close(lock)


def _last_saved(folder: pathlib.Path) -> int:
    """The highest saved_unix_ms there: the clock may have gone back since."""
    last = 0
    for path in folder.glob("step-*/index.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if not path.is_file():  # A FIFO's open would wait.
                continue
            last = max(last, int(json.loads(path.read_text())["saved_unix_ms"]))
    return min(last, 2**63 - 2)


def _flush(directory: pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some file systems cannot flush directories.
            raise
    finally:
        os.close(descriptor)


def write(folder: pathlib.Path, index: dict[str, Any],
          planes: Iterable[tuple[str, dict[str, torch.Tensor]]]) -> pathlib.Path:
    """Writes all or nothing, and replaces nothing."""
    folder.mkdir(exist_ok=True)
    index["epoch"] = _epoch_in(folder)
    name = f"step-{index['step']}.0"
    partial, lock = _make_partial(folder / name)
    try:
        index["files"] = []
        for plane, tensors in planes:
            path = partial / f"{plane}.safetensors"
            _write_safetensors(path, tensors)
            index["files"].append({"plane": plane, "name": path.name, "size_bytes": path.stat().st_size,
                                   "crc32": _crc32(path)})
        index["size_bytes"] = sum(file["size_bytes"] for file in index["files"])
        index["saved_unix_ms"] = max(index["saved_unix_ms"], _last_saved(folder) + 1)
        index["sha256"] = _sign(index)
        with open(partial / "index.json", "x", encoding="utf-8") as file:
            json.dump(index, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        for number in range(1, 1000):
            checkpoint = folder / (name if number == 1 else f"{name}.{number}")
            if checkpoint.exists():
                continue
            _flush(partial)
            partial.rename(checkpoint)
            _flush(folder)
            (checkpoint / _LOCK).unlink(missing_ok=True)
            return checkpoint
        raise FailedPreconditionError(f"{folder} has too many checkpoints of step {index['step']}; delete some")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)
