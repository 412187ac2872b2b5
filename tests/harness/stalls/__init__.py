"""Real jobs in which one thing goes wrong at a known moment, and what is expected to be said of each."""
