"""Who this rank is: the job and attempt it belongs to, the device it uses, the software it runs on."""
