"""What the user writes: schema -> sources -> overrides -> one validated, frozen config."""
