"""What the tests drive the product with: a real Agent, real jobs under torchrun, two hosts on one machine."""
