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
