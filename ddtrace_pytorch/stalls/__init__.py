"""When it stands still: which rank everybody waits for, and what is left of one that died."""
