"""The fidelities of a simulation. The command line reads them here without loading the simulator."""

from typing import Literal

Fidelity = Literal["services", "machines", "queues"]
"""How results come about: the real services run in virtual time, their machines are driven without them, or queues stand for both."""
