"""What tests of benches share: a machine that is not looked at, and two prompts."""

from __future__ import annotations

from specrt.tools.machine import Machine
from specrt.tools.prompting.prompts import Prompt

MACHINE = Machine("a CPU", 2, 1, 0.0, None, {})


PROMPTS = [Prompt("a", "the dog and the dog and the"), Prompt("b", "def area(radius):")]
