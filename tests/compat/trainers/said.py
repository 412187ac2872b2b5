"""What a training says of itself to the test: its losses, to the bit, rank by rank."""

import os


def say(loss, rank=None):
    path = os.path.join(os.environ["SAID"], rank or os.environ["RANK"])
    with open(path, "a", encoding="ascii") as file:
        file.write(float(loss).hex() + "\n")
