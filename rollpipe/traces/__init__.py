"""What a run did, as numbers that can be compared: fingerprint, journal, differences."""
