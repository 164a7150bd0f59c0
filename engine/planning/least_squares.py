"""Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, ch. 10) over five features.

Each step of an engine is learned from, so what would be loops over five numbers is written out: those take three times as long.
The covariance is symmetric, bit for bit, so the 15 numbers that are not below its diagonal stand for all."""

Five = tuple[float, float, float, float, float]

_FORGETTING = 0.995
_MAX_VARIANCE = 1e4
"""The largest variance. Where steps are all alike nothing is learned about the directions they do not show, so forgetting
stops."""
_SIZE = 5


class LeastSquares:
    def __init__(self, theta: Five, variance: float) -> None:
        """Begin with coefficients that are off by this variance each."""
        self.theta = theta
        self._covariance = tuple(variance * (i == j) for i in range(_SIZE) for j in range(i, _SIZE))

    def learn(self, x: Five, residual: float) -> None:
        """Learn that `x` times the coefficients should have been more by `residual`."""
        x0, x1, x2, x3, x4 = x
        p00, p01, p02, p03, p04, p11, p12, p13, p14, p22, p23, p24, p33, p34, p44 = self._covariance
        y0 = p00 * x0 + p01 * x1 + p02 * x2 + p03 * x3 + p04 * x4
        y1 = p01 * x0 + p11 * x1 + p12 * x2 + p13 * x3 + p14 * x4
        y2 = p02 * x0 + p12 * x1 + p22 * x2 + p23 * x3 + p24 * x4
        y3 = p03 * x0 + p13 * x1 + p23 * x2 + p33 * x3 + p34 * x4
        y4 = p04 * x0 + p14 * x1 + p24 * x2 + p34 * x3 + p44 * x4
        kept = _FORGETTING if max(p00, p11, p22, p33, p44) < _MAX_VARIANCE else 1.0
        gain = 1.0 / (kept + dot(x, (y0, y1, y2, y3, y4)))
        t0, t1, t2, t3, t4 = self.theta
        self.theta = (
            t0 + y0 * gain * residual,
            t1 + y1 * gain * residual,
            t2 + y2 * gain * residual,
            t3 + y3 * gain * residual,
            t4 + y4 * gain * residual,
        )
        self._covariance = (
            *((p00 - y0 * y0 * gain) / kept, (p01 - y0 * y1 * gain) / kept, (p02 - y0 * y2 * gain) / kept),
            *((p03 - y0 * y3 * gain) / kept, (p04 - y0 * y4 * gain) / kept, (p11 - y1 * y1 * gain) / kept),
            *((p12 - y1 * y2 * gain) / kept, (p13 - y1 * y3 * gain) / kept, (p14 - y1 * y4 * gain) / kept),
            *((p22 - y2 * y2 * gain) / kept, (p23 - y2 * y3 * gain) / kept, (p24 - y2 * y4 * gain) / kept),
            *((p33 - y3 * y3 * gain) / kept, (p34 - y3 * y4 * gain) / kept, (p44 - y4 * y4 * gain) / kept),
        )


def dot(a: Five, b: Five) -> float:
    a0, a1, a2, a3, a4 = a
    b0, b1, b2, b3, b4 = b
    return a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3 + a4 * b4


def quotient(a: Five, b: Five) -> Five:
    """Divide number by number."""
    a0, a1, a2, a3, a4 = a
    b0, b1, b2, b3, b4 = b
    return a0 / b0, a1 / b1, a2 / b2, a3 / b3, a4 / b4
