"""Fits of a ladder: the best learning rate over sizes, and the loss over parameters and tokens.

The form of the loss is that of Hoffmann et al. (arXiv:2203.15556): L(N, D) = E + A / N^a + B / D^b. With one ratio of
tokens and parameters, D and N are one variable, and L(N) = E + A / N^a. What the fit minimises is not theirs (Huber's
loss of logarithms), but the sum of ((fitted - observed) / observed)^2. For given exponents the other numbers solve a
linear least-squares problem, so the exponents are searched on a grid, which is refined: no start value decides the
result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

Array = NDArray[np.float64]

SAME_RATIO = 1.2
"""Runs whose ratios of tokens and parameters differ by less have the same one."""
_EXPONENTS = np.geomspace(0.03, 1.5, 20)
_REFINEMENTS = 3
_NUMBERS_OF_SIZES = 3
_RIDGE = 1e-12
"""Added to the diagonal of normal equations, because two columns may be the same."""
_SHARE = 0.9
"""Share of the predictions whose range holds what is found."""
_SIGNIFICANT = 0.95
"""Share of trends of mere noise that do not count as one."""
_FACTORS_BEYOND = 2
"""Further factors that are proposed where the best one is at the edge: one more may be the edge again."""
FEWEST_RATES = 4
"""Searched sizes that a range of the learning rate needs, for two degrees of freedom. With one, Student's t and the
distance of the target stretch a small scatter over orders of magnitude."""


@dataclass(frozen=True)
class Range:
    """A prediction.

    Attributes:
        value: The prediction.
        low: Lower end of its range; NaN if nothing is known of it. The fit says what the range is.
        high: Upper end of that range; NaN likewise.
    """

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether there is a range."""
        return not math.isnan(self.low)


@dataclass(frozen=True)
class LossFit:
    """Loss as a function of parameters and tokens.

    Attributes:
        irreducible: E, the loss that no size goes below.
        of_parameters: A and a.
        of_tokens: B and b; None if all runs have one ratio of tokens and parameters.
        ratio: Tokens for each parameter, if all runs have the same.
        deviation: Root mean square of the relative residuals, with the degrees of freedom that are left; NaN if there
            are none.
        freedom: Degrees of freedom: runs less numbers to fit.
        influence: Change of each number with the relative error of each run's loss, [numbers, runs].
    """

    irreducible: float
    of_parameters: tuple[float, float]
    of_tokens: tuple[float, float] | None
    ratio: float | None
    deviation: float
    freedom: int
    influence: Array

    def at_bounds(self) -> Iterator[str]:
        """Yield the numbers that lie at a bound of the search, with what that says of the runs."""
        if self.irreducible == 0:
            yield "E is 0, its bound: the runs show no loss that larger ones approach, so the prediction may be too low"
        terms = [("A", "a", "sizes", self.of_parameters)]
        if self.of_tokens is not None:
            terms.append(("B", "b", "tokens", self.of_tokens))
        for factor, exponent, varied, (number, power) in terms:
            if number == 0:
                yield f"{factor} is 0, its bound: the runs show no gain from more {varied}"
            elif not _EXPONENTS[0] < power < _EXPONENTS[-1]:
                yield f"{exponent} is {power:.3g}, at the edge of those that are searched; the form may not hold"

    def predict(self, parameters: float, tokens: float) -> Range:
        """Return the loss of a run.

        The range is the 90 % prediction interval of least squares, linear in the errors of the runs: by Student's t
        with the degrees of freedom, with the scatter of the predicted run itself. It knows of no error of the form.
        There is none if no degree of freedom is left.
        """
        row = [self.irreducible, *self.of_parameters]
        if self.of_tokens is not None:
            row += self.of_tokens
        numbers = np.array(row)
        n = np.array([float(parameters)])
        d = np.array([float(tokens)])
        value = float(_losses(numbers[None], n, d)[0])
        if self.freedom < 1:
            return Range(value, math.nan, math.nan)
        change = _gradients(numbers, n, d)[0] @ self.influence / value  # with the relative error of each run, [R]
        reach = _students_t(self.freedom) * self.deviation * math.sqrt(1 + float(change @ change)) * value
        return Range(value, max(0.0, value - reach), value + reach)


def _students_t(freedom: int, share: float = _SHARE) -> float:
    """Return how many estimated standard errors to each side hold a share of the errors."""
    return float(stdtrit(freedom, (1 + share) / 2))


def _losses(rows: Array, parameters: Array, tokens: Array) -> Array:
    """Return the loss that numbers E, A, a and maybe B, b give. One row is for all runs, or each run has its own."""
    found: Array = rows[:, 0] + rows[:, 1] * parameters ** -rows[:, 2]
    if rows.shape[1] > 3:
        found = found + rows[:, 3] * tokens ** -rows[:, 4]
    return found


def _gradients(numbers: Array, parameters: Array, tokens: Array) -> Array:
    """Return the change of each run's loss with each of the numbers E, A, a and maybe B, b, [runs, numbers]."""
    of_parameters = parameters ** -numbers[2]
    columns = [np.ones_like(of_parameters), of_parameters, -numbers[1] * np.log(parameters) * of_parameters]
    if len(numbers) > 3:
        of_tokens = tokens ** -numbers[4]
        columns += [of_tokens, -numbers[3] * np.log(tokens) * of_tokens]
    return np.stack(columns, axis=-1)


def fit_loss(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> LossFit:
    """Fit the loss of runs. The sum of squared relative residuals is least.

    Args:
        parameters: Parameters of each run.
        tokens: Tokens of each run.
        losses: Loss of each run.

    Raises:
        ValueError: There are fewer runs than numbers to fit, or fewer sizes than E, A and a.
    """
    n = np.array(parameters, dtype=float)
    d = np.array(tokens, dtype=float)
    observed = np.array(losses, dtype=float)
    ratios = d / n
    is_one_ratio = bool(ratios.max() < SAME_RATIO * ratios.min())
    unknown = _NUMBERS_OF_SIZES if is_one_ratio else 5
    if len(observed) < unknown:
        raise ValueError(f"{len(observed)} runs, but {unknown} numbers to fit")
    if len({*parameters}) < _NUMBERS_OF_SIZES:
        raise ValueError(
            f"{len({*parameters})} sizes, but {_NUMBERS_OF_SIZES} numbers (E, A and a) that only sizes tell"
        )
    numbers = _least_squares(n, d, observed, has_tokens=not is_one_ratio)
    fitted = _losses(numbers[None], n, d)
    freedom = len(observed) - unknown
    residuals = (observed - fitted) / fitted
    return LossFit(
        irreducible=float(numbers[0]),
        of_parameters=(float(numbers[1]), float(numbers[2])),
        of_tokens=None if is_one_ratio else (float(numbers[3]), float(numbers[4])),
        ratio=_middle(ratios) if is_one_ratio else None,
        deviation=math.sqrt(float(np.sum(residuals**2)) / freedom) if freedom else math.nan,
        freedom=freedom,
        influence=_influence(numbers, n, d),
    )


def _least_squares(n: Array, d: Array, observed: Array, *, has_tokens: bool) -> Array:
    """Return E, A, a (and B, b) with the least sum of squared relative residuals; E, A and B are not negative.

    Exponents are those of a grid, which is refined around the best ones. For each of them the others are solved for.

    Args:
        n: Parameters of the runs, [R].
        d: Tokens of the runs, [R].
        observed: Losses of the runs, [R].
        has_tokens: Whether the tokens have a term of their own.
    """
    of_n = _EXPONENTS
    of_d = _EXPONENTS if has_tokens else np.zeros(1)
    for _ in range(1 + _REFINEMENTS):
        exponents = np.stack(np.meshgrid(of_n, of_d, indexing="ij"), axis=-1).reshape(-1, 2)  # pairs a, b, [G, 2]
        # Relative to their middle, so that columns are about 1: that keeps the equations well conditioned.
        columns = [np.ones((len(exponents), len(n))), (n / _middle(n)) ** -exponents[:, :1]]
        if has_tokens:
            columns.append((d / _middle(d)) ** -exponents[:, 1:])
        design = np.stack(columns, axis=-1) / observed[:, None]  # [G, R, C]; relative residuals: the target is 1
        factors, errors = _solved(design)
        best = int(np.argmin(errors))
        a, b = exponents[best]
        of_n = _around(of_n, a)
        if has_tokens:
            of_d = _around(of_d, b)
    numbers = [factors[best, 0], factors[best, 1] * _middle(n) ** a, a]
    if has_tokens:
        numbers += [factors[best, 2] * _middle(d) ** b, b]
    return np.array(numbers)


def _solved(design: Array) -> tuple[Array, Array]:
    """Return the factors of columns, none of them negative, whose sum is nearest to 1 in each row; and the errors.

    Args:
        design: Columns of each problem, [G, R, C].

    Returns:
        Factors, [G, C], and sums of squared errors, [G].
    """
    problems, _, count = design.shape
    factors = np.zeros((problems, count))
    least = np.full(problems, np.inf)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):  # the others are 0: a bound that is reached
            part = design[:, :, chosen]
            normal = part.transpose(0, 2, 1) @ part + _RIDGE * np.eye(size)
            solved = np.linalg.solve(normal, part.sum(axis=1)[..., None])  # [G, size, 1]
            error = np.sum(((part @ solved)[..., 0] - 1) ** 2, axis=1)
            better = (solved[..., 0] >= 0).all(axis=1) & (error < least)
            least[better] = error[better]
            factors[better] = 0
            for position, column in enumerate(chosen):
                factors[better, column] = solved[better, position, 0]
    return factors, least


def _influence(numbers: Array, n: Array, d: Array) -> Array:
    """Return the change of each fitted number with the relative error of each run's loss, [numbers, runs]."""
    gradients = _gradients(numbers, n, d) / _losses(numbers[None], n, d)[:, None]
    scale = np.linalg.norm(gradients, axis=0)
    scale[scale == 0] = 1  # an exponent whose term is 0
    inverse: Array = np.linalg.pinv(gradients / scale) / scale[:, None]
    return inverse


def _middle(values: Array) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


def _around(grid: Array, value: float) -> Array:
    """Return a finer grid between the neighbours of a value."""
    step = grid[1] / grid[0]
    return np.geomspace(value / step, value * step, len(grid))


@dataclass(frozen=True)
class RateFit:
    """Best learning rate, as a multiple of a rule's, over sizes: a line through logarithms of both.

    Attributes:
        factors: Best factor of each searched size by its parameters.
        level: Logarithm of the factor at the mean size.
        trend: Change of that logarithm with the logarithm of the parameters, as the sizes have it.
        slope: The same if they show it; 0 if it may be noise.
        middle: Mean logarithm of the parameters.
        spread: Sum of the squares of their distances from it.
        reach: Half of the range at the mean size if the line were known; NaN if the sizes are too few for a range, or
            some of their best factors are not known.
        at_edge: Sizes, by their parameters, whose best factor was the smallest or largest that was tried, so that the
            best one may lie beyond; with the next factors to try.
    """

    factors: dict[int, float]
    level: float
    trend: float
    slope: float
    middle: float
    spread: float
    reach: float
    at_edge: Mapping[int, tuple[float, ...]]

    @property
    def freedom(self) -> int:
        """Degrees of freedom: sizes less the two numbers of the line."""
        return len(self.factors) - 2

    @property
    def has_range(self) -> bool:
        """Whether a range is known: the sizes are enough, and the best factor of each lies within those tried."""
        return not math.isnan(self.reach)

    def factor(self, parameters: float) -> Range:
        """Return the best factor for a number of parameters.

        The range is the 90 % prediction interval of the line, which grows with the distance from the sizes: a trend
        that they do not show may be there. It is extended to the factor itself, which has no trend then.
        """
        distance = math.log(parameters) - self.middle
        value = self.level + self.slope * distance
        if not self.has_range:
            return Range(math.exp(value), math.nan, math.nan)
        line = self.level + self.trend * distance
        reach = self.reach * math.sqrt(1 + 1 / len(self.factors) + distance**2 / self.spread)
        return Range(math.exp(value), math.exp(min(value, line - reach)), math.exp(max(value, line + reach)))


def fit_learning_rate(tried: dict[int, dict[float, float]]) -> RateFit:
    """Fit the best factor of the learning rate over sizes.

    A parabola through the losses of a size, over the logarithm of the factor, has its minimum at the best factor. A
    trend with the size counts only if Student's t tells it from noise with 95 %: a trend of noise, extrapolated over
    orders of magnitude, would be worse than none.

    Args:
        tried: Losses by factor, for each size by its parameters. One that is not finite is worse than all others: the
            best factor next to it is not at the edge, but no parabola gives a minimum between factors.

    Raises:
        ValueError: A size has no finite loss.
    """
    factors: dict[int, float] = {}
    at_edge: dict[int, tuple[float, ...]] = {}
    are_minima = True
    for parameters, losses in tried.items():
        found, is_minimum = _best_factor(losses)
        factors[parameters] = found
        are_minima &= is_minimum
        if not is_minimum and len(losses) > 1 and found in (min(losses), max(losses)):
            at_edge[parameters] = _beyond(sorted(losses), found)
    x = np.log(np.array(list(factors), dtype=float))
    y = np.log(np.array(list(factors.values())))
    middle = float(x.mean())
    spread = float(np.sum((x - middle) ** 2))
    trend = 0.0
    slope = 0.0
    reach = math.nan
    freedom = len(y) - 2
    if freedom > 0:
        trend = float(np.sum((x - middle) * y)) / spread
        residuals = y - y.mean() - trend * (x - middle)
        around = math.sqrt(float(np.sum(residuals**2)) / freedom)
        if abs(trend) > _students_t(freedom, _SIGNIFICANT) * around / math.sqrt(spread):
            slope = trend
    if len(y) >= FEWEST_RATES and not at_edge:
        # A parabola's minimum is known no better than the distance of factors, and a best factor without one not even
        # so. This error is not told by the few sizes, so it has no t.
        distance = min(_distance(losses) for losses in tried.values())
        resolution = distance / 4 if are_minima else distance / 2
        reach = max(_students_t(freedom) * around, float(ndtri((1 + _SHARE) / 2)) * resolution)
    return RateFit(factors, float(y.mean()), trend, slope, middle, spread, reach, at_edge)


def _distance(losses: dict[float, float]) -> float:
    """Return the smallest distance between factors, in logarithms; that of a factor of 2 if there is one only."""
    tried = np.log(sorted(losses))
    if len(tried) < 2:
        return math.log(2.0)
    return float(np.diff(tried).min())


def _beyond(tried: Sequence[float], edge: float) -> tuple[float, ...]:
    """Return the next factors beyond the smallest or largest of sorted ones, in steps of the last two."""
    step = tried[-1] / tried[-2]
    if edge == tried[0]:
        step = tried[0] / tried[1]
    factors = []
    for count in range(1, 1 + _FACTORS_BEYOND):
        factors.append(float(f"{edge * step**count:.3g}"))
    return tuple(sorted(factors))


def _best_factor(losses: dict[float, float]) -> tuple[float, bool]:
    """Return the best factor of a size, and whether it is a parabola's minimum; else it is one that was tried."""
    finite = {factor: loss for factor, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        raise ValueError("no learning rate of a size has a finite loss")
    tried = sorted(losses)
    best = min(finite, key=finite.__getitem__)
    position = tried.index(best)
    around = tried[max(0, position - 1) : position + 2]
    if len(around) < 3 or not {*around} <= {*finite}:
        return best, False
    x = np.log(np.array(around))
    curvature, linear, _ = np.polyfit(x, [finite[factor] for factor in around], 2)
    return float(np.exp(-linear / (2 * curvature))), True
