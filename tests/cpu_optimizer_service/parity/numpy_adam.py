"""The update as common/rules/adam.h writes it, in NumPy.

Written from that page and from nothing else: numpy_adam_test.py holds the kernels to it bit for bit.
"""

import numpy as np

F32 = np.float32
LEAST_NORMAL = F32(2.0**-126)


def z(x):
    return np.where(np.abs(x) < LEAST_NORMAL, F32(0), x)


def p(x):
    return np.where(np.abs(x) <= LEAST_NORMAL, F32(0), x)


def scalar(x):
    """Double to fp32, denormals to zero; compared in double."""
    return F32(0) if abs(x) < 2.0**-126 else F32(x)


def power_by_squaring(beta, exponent):
    result, square = 1.0, beta
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


def update(h, update_count, multiplier, gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq=None):
    """New master, exp_avg, exp_avg_sq and max_exp_avg_sq, from fp32 arrays and hyper-parameters `h`."""
    bias_correction1 = bias_correction2 = 1.0
    if h["bias_correction"]:
        bias_correction1 = 1.0 - power_by_squaring(h["beta1"], update_count)
        bias_correction2 = 1.0 - power_by_squaring(h["beta2"], update_count)
    multiplier = z(F32(-multiplier if h["maximize"] else multiplier))
    weight_decay = scalar(h["weight_decay"])
    decay = scalar(1.0 - h["lr"] * h["weight_decay"])
    beta1, one_minus_beta1 = scalar(h["beta1"]), scalar(1.0 - h["beta1"])
    beta2, one_minus_beta2 = scalar(h["beta2"]), scalar(1.0 - h["beta2"])
    inverse_sqrt_bias_correction2 = scalar(1.0 / float(np.sqrt(bias_correction2)))
    eps = scalar(h["eps"])
    step_size = scalar(h["lr"] / bias_correction1)

    g = z(gradient)
    g = p(g * multiplier)
    w = z(master)
    if h["weight_decay"] != 0:
        if h["decoupled_weight_decay"]:
            w = p(w * decay)
        else:
            g = z(g + p(weight_decay * w))
    m = z(p(beta1 * z(exp_avg)) + p(one_minus_beta1 * g))
    v = z(p(beta2 * z(exp_avg_sq)) + p(p(one_minus_beta2 * g) * g))
    vm = v if max_exp_avg_sq is None else np.maximum(z(max_exp_avg_sq), v)  # NaN if either is.
    d = np.sqrt(vm) * inverse_sqrt_bias_correction2 + eps
    w = z(w - p(step_size * p(m / d)))
    return w, m, v, vm


def to_bfloat16(x):
    """The nearest bfloat16, found by trying both neighbours; ties to the even one."""
    bits = x.view(np.uint32)
    low = bits >> np.uint32(16)
    high = low + np.uint32(1)

    def value(upper):
        # Beyond the greatest finite value the grid goes on with 2^128, as rounding sees it.
        magnitude = (upper & np.uint32(0x7FFF)) << np.uint32(16)
        finite = magnitude.view(np.float32).astype(np.float64)
        return np.where(magnitude == 0x7F800000, 2.0**128, finite)

    exact = np.abs(x).astype(np.float64)
    below, above = exact - value(low), value(high) - exact
    up = (above < below) | ((above == below) & (low & np.uint32(1) == 1))
    rounded = np.where(up, high, low)
    rounded = np.where(np.isinf(x), low, rounded)
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def to_float16(x):
    return x.astype(np.float16).view(np.uint16)  # NumPy rounds to nearest even, in software or hardware.


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float16(bits):
    return bits.view(np.float16).astype(np.float32)
