"""The scored fault suite: plants faults in tiny real models, compares, and scores what the comparison said."""
