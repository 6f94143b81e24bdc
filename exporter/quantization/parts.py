"""A quantized weight's initializers, computed when they are written."""

from __future__ import annotations

from collections.abc import Callable

from specrt.engines.interface import Array


class LazyParts:
    """``make`` gives the integers of a weight, then its small parts: scales, and zero points where there are some.

    It runs when the integers are requested. The small parts are then cached; the integers are not.
    """

    def __init__(self, make: Callable[[], tuple[Array, ...]]) -> None:
        self._make = make
        self._small: tuple[Array, ...] = ()

    def data(self) -> Array:
        """The integers."""
        data, *small = self._make()
        self._small = tuple(small)
        return data

    def scales(self) -> Array:
        return self._kept(0)

    def zero_points(self) -> Array:
        return self._kept(1)

    def _kept(self, index: int) -> Array:
        if not self._small:
            self.data()
        return self._small[index]
