"""Experiments for tests of the runner, which a separate process imports by name."""

from __future__ import annotations

import os
import time

from specrt.tools.gpu_check.experiment import Experiment, Failed, Notes, Skip
from specrt.tools.gpu_check.kit import Kit


def passes(kit: Kit, notes: Notes) -> None:
    notes.add("bundle", str(kit.standard))
    notes.add("by width", {1: 0.25, 2: 0.5})


def fails(kit: Kit, notes: Notes) -> None:
    raise Failed("7 of 8 items differ | by one")


def finds_no_file(kit: Kit, notes: Notes) -> None:
    raise Failed(f"{kit.standard}/target/model.onnx: not readable")


def skips(kit: Kit, notes: Notes) -> None:
    raise Skip("this card has no such thing")


def hangs(kit: Kit, notes: Notes) -> None:
    notes.add("before", 1)
    time.sleep(60)


def crashes(kit: Kit, notes: Notes) -> None:
    notes.add("before", 2)
    os.abort()


def raises(kit: Kit, notes: Notes) -> None:
    raise KeyError("an unexpected name")


ALL = (
    Experiment("passes", "?", 20, {"numpy": "numpy"}, ("standard",), passes),
    Experiment("fails", "?", 20, {}, (), fails),
    Experiment("finds no file", "?", 20, {}, ("standard",), finds_no_file),
    Experiment("skips", "?", 20, {}, (), skips),
    Experiment("hangs", "?", 2, {}, (), hangs),
    Experiment("crashes", "?", 20, {}, (), crashes),
    Experiment("raises", "?", 20, {}, (), raises),
    Experiment("lacks a module", "?", 20, {"no_such.module": "no-such-package"}, (), passes),
    Experiment("lacks a part", "?", 20, {}, ("layers",), passes),
)
