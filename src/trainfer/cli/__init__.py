"""One file a verb: parse, call, print, exit code."""
