"""Experiments, not part of the wheel: ``python -m specrt.tools.lab.NAME``."""
