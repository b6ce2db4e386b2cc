"""Files on the disk: written whole, sealed, claimed, read with suspicion, and fetched."""
