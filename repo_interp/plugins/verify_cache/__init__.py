"""At which position every key of a cache stands."""
