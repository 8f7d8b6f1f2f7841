"""The third generator: a small blind set, written without sight of the rules and of the other two sets' plants."""
