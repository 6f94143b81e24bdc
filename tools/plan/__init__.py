"""``specrt plan``: a pair's bytes and times from configs and a device's figures."""
