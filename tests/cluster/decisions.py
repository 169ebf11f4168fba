"""Of one uid and one load no step is decided twice, whichever processes have led the job. Services with
--log-level=debug log each decision."""

import collections
import re

DECISION = re.compile(r"step (\d+) is decided \(uid (\w+), load (\d+)\)")


def check(logs):
    """These are the texts of all services' logs. Returns the number of decisions."""
    decided = collections.Counter(decision for log in logs for decision in DECISION.findall(log))
    twice = [f"step {step} of uid {uid}, load {load}" for (step, uid, load), count in decided.items() if count > 1]
    if twice:
        raise AssertionError(f"decided twice: {', '.join(twice)}")
    return decided.total()
