"""The update rules as common/rules writes them, in NumPy. Adam's is in numpy_adam.py."""

import numpy as np

import numpy_adam
from numpy_adam import F32, p, scalar, z


def _gradient(h, multiplier, gradient):
    return p(z(gradient) * z(F32(-multiplier if h["maximize"] else multiplier)))


def _decay(h):
    return scalar(1.0 - h["lr"] * h["weight_decay"])


def adam(h, update_count, multiplier, gradient, *planes):
    largest = planes[3] if h["amsgrad"] else None
    return numpy_adam.update(h, update_count, multiplier, gradient, *planes[:3], largest)[:len(planes)]


def sgd(h, update_count, multiplier, gradient, master, buffer=None):
    w = z(master)
    g = z(_gradient(h, multiplier, gradient) + p(scalar(h["weight_decay"]) * w))
    if buffer is None:
        return (z(w - p(scalar(h["lr"]) * g)),)
    momentum = scalar(h["momentum"])
    b = g if update_count == 1 else z(p(momentum * z(buffer)) + p(scalar(1.0 - h["dampening"]) * g))
    g = z(g + p(momentum * b)) if h["nesterov"] else b
    return z(w - p(scalar(h["lr"]) * g)), b


def lion(h, update_count, multiplier, gradient, master, exp_avg):
    g, m = _gradient(h, multiplier, gradient), z(exp_avg)
    c = z(p(scalar(h["beta1"]) * m) + p(scalar(1.0 - h["beta1"]) * g))
    w = z(p(z(master) * _decay(h)) - scalar(h["lr"]) * np.sign(c))
    return w, z(p(scalar(h["beta2"]) * m) + p(scalar(1.0 - h["beta2"]) * g))


def adagrad(h, update_count, multiplier, gradient, master, total):
    w = z(master)
    g = z(_gradient(h, multiplier, gradient) + p(scalar(h["weight_decay"]) * w))
    s = z(z(total) + p(g * g))
    step_size = scalar(h["lr"] / (1 + (update_count - 1) * h["lr_decay"]))
    return z(w - p(step_size * p(g / (np.sqrt(s) + scalar(h["eps"]))))), s


def sign_sgd(h, update_count, multiplier, gradient, master):
    g = _gradient(h, multiplier, gradient)
    return (z(p(z(master) * _decay(h)) - scalar(h["lr"]) * np.sign(g)),)


def muon(h, update_count, multiplier, gradient, master, buffer):
    """h has the matrix's shape, too."""
    momentum = scalar(h["momentum"])
    g = p(scalar(float(F32(multiplier)) * (1.0 - h["momentum"])) * z(gradient))
    b = z(g + p(momentum * z(buffer)))
    u = z(g + p(momentum * b)) if h["nesterov"] else b
    rows, columns = h["shape"]
    o = newton_schulz(h, numpy_adam.from_bfloat16(numpy_adam.to_bfloat16(u)).reshape(rows, columns)).reshape(-1)
    if not np.isfinite(o).all():
        return master, b
    adjustment = F32(0.2 * max(rows, columns) ** 0.5 if h["match_rms_adamw"] else max(1.0, rows / columns) ** 0.5)
    step = scalar(h["lr"] * float(adjustment))
    return z(p(_decay(h) * z(master)) + p(-step * z(o))), b


def newton_schulz(h, x):
    """O of a direction, as common/rules/newton_schulz.h writes it."""
    tall = x.shape[0] > x.shape[1]
    x = np.ascontiguousarray(x.T if tall else x)
    squares = x.astype(np.float64) ** 2
    norm = F32(np.sqrt(np.cumsum(np.cumsum(squares, axis=1)[:, -1])[-1]))  # cumsum adds in order.
    with np.errstate(all="ignore"):
        x = x / np.maximum(norm, scalar(h["eps"]))
        for _ in range(h["ns_steps"]):
            a = _product(x, x.T)
            x = scalar(h["ns_a"]) * x + _product(scalar(h["ns_b"]) * a + scalar(h["ns_c"]) * _product(a, a), x)
        x = numpy_adam.from_bfloat16(numpy_adam.to_bfloat16(np.ascontiguousarray(x.T if tall else x)))
    return x


def _product(a, b):
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total = total + a[:, k:k + 1] * b[k:k + 1]
    return total
