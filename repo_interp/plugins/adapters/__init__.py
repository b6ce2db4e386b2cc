"""Adapters: small changes of a base checkpoint, loaded, merged, trained and saved."""
