"""What a rank says to the other ranks."""
