"""The loss of a run, as a picture and as numbers."""

import csv
import pathlib

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402


def write(folder, losses, title):
    """losses: by step number. Writes losses.csv and loss.png."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "losses.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "loss"), *losses.items()])
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(list(losses), list(losses.values()))
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)
    pyplot.close(figure)
