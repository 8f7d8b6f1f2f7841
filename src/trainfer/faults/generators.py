"""Which faults and controls a run plants: the first generator's, the second's, or both.

Takes a generator's name; gives what it plants, by name. The second was written without sight of the first and of the rules that
name causes, so that a rule that fits the first's plants and not the maths of a fault shows.
"""

from collections.abc import Mapping
from enum import StrEnum

from trainfer.faults import catalogue, controls
from trainfer.faults.fault import Control, Fault
from trainfer.faults.second import planted


class Generator(StrEnum):
    """Who wrote the plants."""

    FIRST = "first"
    """The set that the rules were developed beside."""
    SECOND = "second"
    """The blind set."""
    BOTH = "both"
    """One after the other."""


def faults_of(generator: Generator) -> Mapping[str, Fault]:
    """Faults by name."""
    match generator:
        case Generator.FIRST:
            return catalogue.FAULTS
        case Generator.SECOND:
            return planted.FAULTS
        case Generator.BOTH:
            return {**catalogue.FAULTS, **planted.FAULTS}


def controls_of(generator: Generator) -> tuple[Control, ...]:
    """Controls in their order."""
    match generator:
        case Generator.FIRST:
            return tuple(controls.CONTROLS)
        case Generator.SECOND:
            return planted.CONTROLS
        case Generator.BOTH:
            return (*controls.CONTROLS, *planted.CONTROLS)
