"""What looking costs the service: its CPU time while nobody looks, while pages are open, and while it is scraped.

    status_cost.py BALLASTD PROTO_FOLDER [SECONDS]

The jobs stand still, so what is measured is the looking. A page is what its script asks for: /api/job once a
second, /api/service every tenth time. CPU time is the kernel's, in nanoseconds, of all threads.
"""

import pathlib
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "status"), str(HERE.parent / "support")]

from played_jobs import played  # noqa: E402
from processes import Service  # noqa: E402
from status_pages import get, status_address  # noqa: E402


def cpu_seconds(pid):
    """Of threads that have ended nothing is counted; the service starts and ends none meanwhile."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()) / 1e9


def asking(base, stop, paths, every):
    turn = 0
    while not stop.wait(every):
        for path, each in paths:
            if turn % each == 0:
                get(base + path)
        turn += 1


def main(ballastd, proto, seconds=20.0):
    with tempfile.TemporaryDirectory() as folder:
        service = Service(ballastd, pathlib.Path(folder), "--holder=none", "--metrics-listen=0", "--memory-limit=1GiB")
        try:
            base = status_address(service)
            with played(service.address, proto) as jobs:
                jobs[0].stopped.set()  # Its ranks leave after their step.
                for thread in jobs[0].threads:
                    thread.join(10)
                page = [("/api/job?job=stuck", 1), ("/api/service", 10)]
                cases = {"nobody looks": [], "one page": [(page, 1.0)], "eight pages": [(page, 1.0)] * 8,
                         "the list of jobs": [([("/api/service", 1)], 1.0)],
                         "scraped every 5 s": [([("/metrics", 1)], 5.0)]}
                for name, askers in cases.items():
                    stop = threading.Event()
                    threads = [threading.Thread(target=asking, args=(base, stop, *asker)) for asker in askers]
                    for thread in threads:
                        thread.start()
                    time.sleep(1)
                    begin, before = time.monotonic(), cpu_seconds(service.process.pid)
                    time.sleep(float(seconds))
                    share = (cpu_seconds(service.process.pid) - before) / (time.monotonic() - begin)
                    stop.set()
                    for thread in threads:
                        thread.join()
                    if share == 0:
                        raise AssertionError("no time of the service was measured")
                    print(f"{name:20} {100 * share:6.3f} % of a core", flush=True)
        finally:
            service.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
