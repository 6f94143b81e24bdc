"""What passes cost on this machine, in ms: measured by ``specrt tune``, and corrected by every round that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_RATE = 0.2  # weight of the newest time; a controller must follow a machine that others use too
_SHARED_RATE = 0.1  # the same on all other widths: load, and the length of the context, act on all
_LEAST_MS = 1e-3  # what a coarse clock calls 0
_OUTLIER = 3.0  # a pass that takes so many times as long as expected was interrupted: it counts as this much

FurtherReads = Callable[[int], float]


class LatencyModel:
    """Times of a pass by width, [1 .. max_width] tokens. Widths not seen yet follow from those seen.

    ``slope`` is the guess for what each further token adds, as a share of the first; ``further_reads`` of a width is
    what a pass of that width reads beyond one of one token, as a share of that (more experts). Several threads may
    observe: the newest wins.
    """

    def __init__(
        self,
        slope: float,
        measured: Mapping[int, float] | None = None,
        further_reads: FurtherReads | None = None,
    ) -> None:
        self._slope, self._further_reads = slope, further_reads
        self._ms: dict[int, float] = dict(measured or {})

    @property
    def is_known(self) -> bool:
        """Whether any pass was seen."""
        return bool(self._ms)

    def ms(self, width: int) -> float:
        """The expected time of a pass of ``width`` tokens. Call only when ``is_known``."""
        if width in self._ms:
            return self._ms[width]
        below = max((seen for seen in self._ms if seen < width), default=None)
        above = min((seen for seen in self._ms if seen > width), default=None)
        if below is not None and above is not None:
            share = (width - below) / (above - below)
            return self._ms[below] + share * (self._ms[above] - self._ms[below])
        nearest = below if below is not None else above
        assert nearest is not None
        return self._ms[nearest] * self._growth(width) / self._growth(nearest)

    def _growth(self, width: int) -> float:
        """The time of a pass over that of one token, as it is assumed before it is measured."""
        reads = self._further_reads(width) if self._further_reads else 0.0
        return 1 + self._slope * (width - 1) + reads

    def observe(self, width: int, ms: float) -> None:
        """A pass of ``width`` tokens took ``ms``."""
        ms = max(ms, _LEAST_MS)
        if not self.is_known:
            self._ms[width] = ms
            return
        expected = self.ms(width)
        change = min(ms / expected, _OUTLIER) - 1
        for seen in self._ms:
            self._ms[seen] *= 1 + _SHARED_RATE * change
        self._ms[width] = expected * (1 + _RATE * change)

    def as_dict(self) -> dict[int, float]:
        """ms by width, of the widths that were seen."""
        return dict(sorted(self._ms.items()))
