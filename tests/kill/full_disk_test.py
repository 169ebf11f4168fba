#!/usr/bin/env python3
"""A disk that is really full: a small tmpfs under --checkpoint-dir, on which a service saves each step until nothing
more fits. What was complete stays and loads with its bits, each save that fails says so in one line that names the
disk, training goes on, also when the service's process dies and the next takes over, or when all of it is started again
with --state-dir or upgraded, and once there is room the next save is complete and takes what was left half written
away. And an export to an empty mount point is refused at once.

The tmpfs is mounted in a mount namespace of the test's own. Exits with 77, saying why, where the machine allows none.
"""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import save_test
from save_test import BIN, KEEP, Service, Trainer, complete, leftovers
from processes import PATIENCE, Ended, await_, children_of, read, tail

STATE_BYTES = 3 * 4 * save_test.ELEMENTS  # Of a checkpoint: three planes in fp32.
ROOM = KEEP * STATE_BYTES + STATE_BYTES // 2  # For all that are kept, and not for one more.
LEFT = "step-9.1.partial-0123456789abcdef"  # As a process leaves it that is killed while it saves.
SKIPPED = 77


def mount(directory, size_bytes, again=False):
    how = f"size={size_bytes}" + (",remount" if again else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", how, "none", directory], check=True)


def has_step(saved, step):
    return any(name.startswith(f"step-{step}.") for name in complete(saved))


def has_saved(service, saved, step):
    """And has ended that save: while one is under way, a step that is decided begins no other."""
    return has_step(saved, step) and not json.loads(service.ask("job", "gpt", "--json").stdout)["saves"]


def failures(service):
    return [line for line in read(service.log).splitlines() if "was not saved at step" in line]


def has_failed(service, step):
    return any(f"was not saved at step {step}:" in line for line in failures(service))


def one_line(text):
    lines = text.splitlines()
    if len(lines) != 1:
        raise AssertionError(f"expected one line, and this came: {text}")
    return lines[0]


def expect_names_disk(line, saved):
    if str(saved) not in line or "No space left on device" not in line:
        raise AssertionError(f"this line does not name the disk that is full: {line}")


def fill(service, saved):
    """Trains while there is room, and for three steps after. Returns the trainer and its last step."""
    trainer = Trainer(service.address)
    trainer.begin(load=False)
    for step in range(1, KEEP + 1):
        trainer.step(step)
        await_(f"the checkpoint of step {step}", functools.partial(has_saved, service, saved, step), service.process)
    for step in range(KEEP + 1, KEEP + 4):
        trainer.step(step)
        await_("a save that fails", functools.partial(has_failed, service, step), service.process)
    for line in failures(service):
        expect_names_disk(line, saved)
    return trainer, KEEP + 3


def expect_older_stand(service, saved):
    names = {name.split(".")[0] for name in complete(saved)}
    if names != {f"step-{step}" for step in range(1, KEEP + 1)}:
        raise AssertionError(f"on the full disk there are {sorted(names)}")
    verified = service.ask("verify", "gpt")
    if verified.returncode != 0:
        raise AssertionError(f"on the full disk: {verified.stderr}")


def kill_process_of(service):
    """Of the service's parent the child; another takes over, on the full disk."""
    [child] = children_of(service.process.pid)
    os.kill(child, signal.SIGKILL)
    await_("the next process", lambda: children_of(service.process.pid) not in ([], [child]), service.process)
    await_("its jobs", lambda: "after a death: job gpt" in read(service.log), service.process)
    expect_told_once(service)


def upgrade_process_of(service):
    """By the same program, on the full disk."""
    done = subprocess.run([BIN / "ballastd", f"--upgrade={service.process.pid}"], text=True, capture_output=True,
                          timeout=PATIENCE, check=False)
    if done.returncode != 0:
        raise AssertionError(f"an upgrade on a full disk: {done.stderr}")


def expect_told_once(service):
    said = [line for line in read(service.log).splitlines() if "no job could be saved" in line]
    if len(said) != 1 or "No space left on device" not in said[0]:
        raise AssertionError(f"of the full disk the next process said: {said}")


def play_on_full_disk(service, saved):
    trainer, step = fill(service, saved)
    asked = service.ask("save", "gpt")
    if asked.returncode != 1:
        raise AssertionError(f"a save on a full disk: {asked}")
    expect_names_disk(one_line(asked.stderr), saved)
    expect_older_stand(service, saved)
    if leftovers(saved):
        raise AssertionError(f"failed saves left {leftovers(saved)}, with which the disk stays full")
    trainer.step(step + 1)  # As before.
    await_("a save that fails", functools.partial(has_failed, service, step + 1), service.process)
    leave_half_written(saved)
    kill_process_of(service)
    trainer.step(step + 2)
    leave_half_written(saved)
    upgrade_process_of(service)
    trainer.step(step + 3)
    expect_older_stand(service, saved)
    trainer.session.close()
    trainer = Trainer(service.address)
    begun = trainer.begin(load=True)  # Compares the weights with those of that step before.
    if begun != KEEP:
        raise AssertionError(f"on a full disk step {begun} was loaded")
    trainer.step(begun + 1)  # Here, too, to the bits of the step before.
    trainer.session.close()


def leave_half_written(saved):
    """As a process does that is killed while it saves, until the disk is full."""
    left = saved / "gpt" / LEFT
    left.mkdir(exist_ok=True)
    with contextlib.suppress(OSError), (left / "master.safetensors").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def expect_no_start(folder, saved):
    try:
        service = Service(folder, saved)
    except Ended as error:
        line = str(error).splitlines()[-1]
        expect_names_disk(line, saved)
        return
    service.stop()
    raise AssertionError("a service began on a full disk, and said nothing")


def play_with_room_again(service, saved):
    trainer = Trainer(service.address)
    step = trainer.begin(load=True)
    if step != KEEP:
        raise AssertionError(f"with room again, step {step} was loaded")
    trainer.step(step + 1)
    await_("a checkpoint where there is room", functools.partial(has_step, saved, step + 1), service.process)
    await_("the end of what was left", lambda: not leftovers(saved), service.process)
    verified = service.ask("verify", "gpt")
    if verified.returncode != 0:
        raise AssertionError(f"with room again: {verified.stderr}")
    trainer.session.close()


def play_kept_in_a_directory(folder, saved, state):
    """All of the service ends on a full disk; the next one finds its jobs where the directory keeps them."""
    flag = f"--state-dir={state}"
    with service_on(folder, saved, flag) as service:
        trainer, step = fill(service, saved)
        leave_half_written(saved)
    trainer.session.close()
    for file in (service.log, service.port_file):
        file.unlink()
    with service_on(folder, saved, flag) as service:
        expect_told_once(service)
        trainer.join()
        if trainer.session.committed_step != step:
            raise AssertionError(f"the job is at step {trainer.session.committed_step}, and was at {step}")
        trainer.step(step + 1)
        await_("a save that fails", functools.partial(has_failed, service, step + 1), service.process)
        for line in failures(service):
            expect_names_disk(line, saved)
        mount(saved, 4 * ROOM, again=True)
        trainer.step(step + 2)
        await_("a checkpoint where there is room", functools.partial(has_step, saved, step + 2), service.process)
        trainer.session.close()


def play_export(folder, saved):
    """To where an empty file system is mounted, whose place no directory can take, and into it."""
    empty = folder / "empty"
    empty.mkdir()
    mount(empty, 2 * STATE_BYTES)

    def export(to):
        return subprocess.run([BIN / "ballast", "export", saved / "gpt", to], text=True, capture_output=True,
                              timeout=PATIENCE, check=False)

    refused = export(empty)
    if refused.returncode == 0 or f"{empty} is where a file system is mounted" not in one_line(refused.stderr):
        raise AssertionError(f"an export to a mount point: {refused}")
    exported = export(empty / "model")
    if exported.returncode != 0 or not (empty / "model/model.safetensors").exists():
        raise AssertionError(f"an export into a file system of its own: {exported}")


@contextlib.contextmanager
def service_on(folder, saved, *flags):
    service = Service(folder, saved, *flags)
    try:
        yield service
    except BaseException:
        print(f"the service said:{tail(service.log, 40)}", file=sys.stderr)
        raise
    finally:
        service.stop()


def play(folder):
    saved = folder / "saved"
    lives = [folder / name for name in ("full", "refused", "room", "kept")]
    for new in (saved, *lives):
        new.mkdir()
    mount(saved, ROOM)
    with service_on(lives[0], saved) as service:
        play_on_full_disk(service, saved)
        failed = len(failures(service))
    leave_half_written(saved)
    expect_no_start(lives[1], saved)
    mount(saved, 4 * ROOM, again=True)
    with service_on(lives[2], saved) as service:
        leave_half_written(saved)
        upgrade_process_of(service)  # Without a job.
        mount(saved, 8 * ROOM, again=True)
        play_with_room_again(service, saved)
    kept_saved, state = folder / "kept-saved", folder / "state"
    for new, room in ((kept_saved, ROOM), (state, 64 * STATE_BYTES)):
        new.mkdir()
        mount(new, room)
    play_kept_in_a_directory(lives[3], kept_saved, state / "jobs")
    play_export(folder, saved)
    print(f"{failed} saves failed on a full disk, and {KEEP} checkpoints stood")


def in_namespace():
    """This test in a namespace where it may mount; None: the machine allows none."""
    for options in ("-rm", "-m"):
        allowed = subprocess.run(["unshare", options, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True,
                                 check=False)
        if allowed.returncode == 0:
            return ["unshare", options, sys.executable, "-B", __file__, "--mounted"]
    print(f"skipped: no tmpfs can be mounted here: {allowed.stderr.decode().strip()}")
    return None


def main():
    if "--mounted" not in sys.argv:
        if not shutil.which("unshare"):
            print("skipped: there is no unshare")
            sys.exit(SKIPPED)
        command = in_namespace()
        sys.exit(SKIPPED if command is None else subprocess.run(command, check=False).returncode)
    with tempfile.TemporaryDirectory(prefix="ballast-full-") as temporary:
        try:
            play(pathlib.Path(temporary))
        finally:
            for mounted in ("saved", "kept-saved", "state", "empty"):
                subprocess.run(["umount", "-l", pathlib.Path(temporary, mounted)], stderr=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()
