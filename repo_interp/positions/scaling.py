"""Frequencies for contexts beyond the training length: position interpolation and YaRN.

    interpolation   theta / s                                  (Chen et al. 2023: positions z / s)
    YaRN            theta ((1 - ramp) + ramp / s),
                    cosines and sines times 0.1 ln s + 1       (Peng et al. 2024, sec. 3.2-3.4)

s is the factor of the extension. A component turns theta L / 2 pi times within the training length
L. Its frequency is unchanged if it turns at least beta_fast = 32 times, and divided by s if it
turns at most beta_slow = 1 time. The ramp between the two is linear in the number of the component,
as in the authors' code and transformers, and starts and ends at whole components. For any other set
of frequencies, the number of a component follows from ln theta: 0 for the largest frequency, then
in units of the mean spacing down to the smallest frequency other than 0. For RoPE this is the
ordinary number, and components that HoPE keeps have the same numbers. A frequency of 0 stays 0.

This module does not know which layers use the frequencies.
"""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor


def interpolate(
    frequencies: Float[Tensor, "component"], factor: float
) -> Float[Tensor, "component"]:
    """Divide frequencies by a factor: position interpolation.

    Args:
        frequencies: Radians per position [component].
        factor: s.

    Returns:
        Radians per position [component].
    """
    return frequencies / _require_positive(factor, "factor")


def with_base(
    frequencies: Float[Tensor, "component"], unscaled: Float[Tensor, "component"], theta: float
) -> Float[Tensor, "component"]:
    """Replace the base of theta_r = base^(-r/n), and keep the scaling relative to `unscaled`.

    Args:
        frequencies: Radians per position [component], possibly scaled.
        unscaled: Frequencies before scaling [component].
        theta: The new base.

    Returns:
        Radians per position [component]; 0 stays 0.

    Raises:
        ValueError: There are fewer than two different frequencies.
    """
    logs = unscaled[unscaled > 0].double().log().unique()
    if len(logs) < 2:
        raise ValueError("a base is defined by at least two different frequencies")
    # Neighbors differ by ln(base) / n, so n steps are ln(base).
    log_base = float(logs[-1] - logs[0]) / (len(logs) - 1) * len(logs)
    # base^(-r / n) to the power ln(theta) / ln(base) is theta^(-r / n); 0 is replaced by 1 here.
    other = unscaled.double().where(unscaled > 0, 1.0) ** (
        math.log(_require_positive(theta, "base")) / log_base
    )
    return (frequencies.double() / unscaled.double().where(unscaled > 0, 1.0) * other).to(
        frequencies
    )


def ntk_frequencies(
    frequencies: Float[Tensor, "component"], factor: float
) -> Float[Tensor, "component"]:
    """Divide the slowest frequency by a factor, keep the fastest, and scale the others between.

        theta_r <- theta_r s^(-r / (n - 1)), the base b s^(d / (d - 2)) for d = 2 n dimensions

    Args:
        frequencies: Frequencies in radians per position; 0 stays 0.
        factor: Factor s of the extension.

    Returns:
        Frequencies in the order and type of `frequencies`.
    """
    exact = frequencies.detach().cpu().double()  # not every device has float64
    turning = exact != 0  # learned ones may turn backwards
    logs = exact.abs().where(turning, 1.0).log()
    slowest, fastest = logs[turning].aminmax() if bool(turning.any()) else (0.0, 0.0)
    # 0 for the fastest, 1 for the slowest; r / (n - 1) for the frequencies of RoPE
    places = (fastest - logs) / max(float(fastest - slowest), 1e-9)
    return (exact * _require_positive(factor, "factor") ** -places).to(frequencies)


def yarn_attention_scaling(factor: float) -> float:
    """Return YaRN's factor of cosines and sines: 0.1 ln factor + 1.

    Args:
        factor: Factor s of the extension.

    Returns:
        The factor; 1 without an extension.
    """
    return 1.0 if _require_positive(factor, "factor") <= 1.0 else 0.1 * math.log(factor) + 1.0


def yarn_frequencies(
    frequencies: Float[Tensor, "component"],
    factor: float,
    training_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Float[Tensor, "component"]:
    """Scale frequencies as YaRN does, to use with `yarn_attention_scaling`.

    Args:
        frequencies: Radians per position [component].
        factor: s.
        training_length: L, before extension.
        beta_fast: Turns within L from which a component stays.
        beta_slow: Turns within L up to which a component is divided by s.

    Returns:
        Radians per position [component], in the order and dtype given.
    """
    _require_positive(factor, "factor")
    _require_positive(training_length, "training length")
    exact = frequencies.detach().cpu().double()  # not every device has float64
    turning = exact != 0  # learned ones may turn backwards
    distinct = exact[turning].abs().unique().log()
    if len(distinct) == 0:
        return frequencies.clone()
    # By value, not by index: frequencies of HoPE have zeros, and those of AB3 repeat.
    fastest = float(distinct[-1])
    spacing = float(distinct[-1] - distinct[0]) / (len(distinct) - 1) if len(distinct) > 1 else 1.0

    def number(log_frequency: float) -> float:
        return (fastest - log_frequency) / spacing

    # Whole components, as in the authors' code.
    start = max(math.floor(number(math.log(2.0 * math.pi * beta_fast / training_length))), 0)
    end = min(
        math.ceil(number(math.log(2.0 * math.pi * beta_slow / training_length))),
        # d_head - 1, the bound in transformers
        2 * len(frequencies) - 1,
    )
    # Numbers from ln theta, so that sets with gaps (HoPE) get the ramp of RoPE.
    numbers = (fastest - exact.abs().where(turning, 1.0).log()) / spacing
    # 1e-3, as in transformers, if the ramp starts and ends at the same component
    ramp = ((numbers - start) / max(end - start, 1e-3)).clamp(0.0, 1.0)
    return (exact * ((1.0 - ramp) + ramp / factor)).to(frequencies)


def _require_positive(value: float, name: str) -> float:
    if not value > 0:
        raise ValueError(f"a positive {name} was wanted; got {value}")
    return value
