"""What this rank's GPU does."""
