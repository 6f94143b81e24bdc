"""Times of passes on this machine, in ms: measured by ``specrt tune`` and updated by every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_RATE = 0.2  # weight of the newest time; the load of the machine may change
_SHARED_RATE = 0.1  # the same for all other widths: load and context length affect all of them
_LEAST_MS = 1e-3  # smallest time; a coarse clock may return 0
_OUTLIER = 3.0  # times the expected time: a longer pass was probably interrupted and is clipped to this

FurtherReads = Callable[[int], float]


class LatencyModel:
    """Times of a pass by width, [1 .. max_width] tokens. Widths not measured yet are estimated from the others.

    ``slope`` is the assumed cost of each further token, as a share of the first one's. ``further_reads`` of a width is
    how much more a pass of that width reads than a pass of one token, as a share of the latter (more experts). Several
    threads may observe: the newest value wins.
    """

    def __init__(
        self,
        slope: float,
        measured: Mapping[int, float] | None = None,
        further_reads: FurtherReads | None = None,
    ) -> None:
        self._slope, self._further_reads = slope, further_reads
        self._ms: dict[int, float] = dict(measured or {})  # replaced, never changed: other threads may be reading it

    @property
    def is_known(self) -> bool:
        """Whether any pass was measured."""
        return bool(self._ms)

    def ms(self, width: int) -> float:
        """The expected time of a pass of ``width`` tokens. Call only when ``is_known``."""
        known = self._ms
        if width in known:
            return known[width]
        below = max((seen for seen in known if seen < width), default=None)
        above = min((seen for seen in known if seen > width), default=None)
        if below is not None and above is not None:
            share = (width - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        nearest = below if below is not None else above
        assert nearest is not None
        return known[nearest] * self._growth(width) / self._growth(nearest)

    def _growth(self, width: int) -> float:
        """The assumed time of a pass over that of a pass of one token, until it is measured."""
        reads = self._further_reads(width) if self._further_reads else 0.0
        return 1 + self._slope * (width - 1) + reads

    def observe(self, width: int, ms: float) -> None:
        """Record a pass of ``width`` tokens that took ``ms``."""
        ms = max(ms, _LEAST_MS)
        if not self.is_known:
            self._ms = {width: ms}
            return
        expected = self.ms(width)
        change = min(ms / expected, _OUTLIER) - 1
        shared = {seen: known * (1 + _SHARED_RATE * change) for seen, known in self._ms.items()}
        self._ms = {**shared, width: expected * (1 + _RATE * change)}

    def as_dict(self) -> dict[int, float]:
        """ms by width, for the measured widths."""
        return dict(sorted(self._ms.items()))
