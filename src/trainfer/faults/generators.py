"""Which faults and controls a run plants: the first generator's, the second's, both, or the third's.

Takes a generator's name; gives what it plants, by name. The second was written without sight of the first and of the rules that
name causes, so that a rule that fits the first's plants and not the maths of a fault shows. The third was written in the same way
after the rules had been made to fit the second.
"""

from collections.abc import Mapping
from enum import StrEnum

from trainfer.faults import catalogue, controls
from trainfer.faults.fault import Control, Fault
from trainfer.faults.second import planted
from trainfer.faults.third import planted as third_planted


class Generator(StrEnum):
    """Who wrote the plants."""

    FIRST = "first"
    """The set that the rules were developed beside."""
    SECOND = "second"
    """The blind set."""
    BOTH = "both"
    """The first, then the second."""
    THIRD = "third"
    """A small blind set, written last."""


def faults_of(generator: Generator) -> Mapping[str, Fault]:
    """Faults by name."""
    match generator:
        case Generator.FIRST:
            return catalogue.FAULTS
        case Generator.SECOND:
            return planted.FAULTS
        case Generator.BOTH:
            return {**catalogue.FAULTS, **planted.FAULTS}
        case Generator.THIRD:
            return third_planted.FAULTS


def controls_of(generator: Generator) -> tuple[Control, ...]:
    """Controls in their order."""
    match generator:
        case Generator.FIRST:
            return tuple(controls.CONTROLS)
        case Generator.SECOND:
            return planted.CONTROLS
        case Generator.BOTH:
            return (*controls.CONTROLS, *planted.CONTROLS)
        case Generator.THIRD:
            return third_planted.CONTROLS


def every_fault() -> Mapping[str, Fault]:
    """Faults of all generators, by name; names do not meet."""
    return {**faults_of(Generator.BOTH), **faults_of(Generator.THIRD)}


def every_control() -> tuple[Control, ...]:
    """Controls of all generators."""
    return (*controls_of(Generator.BOTH), *controls_of(Generator.THIRD))
