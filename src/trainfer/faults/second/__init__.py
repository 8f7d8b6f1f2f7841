"""A second set of faults and controls, written without sight of the rules that name causes or of the first set's plants."""
