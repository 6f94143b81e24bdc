"""``specrt plan``: memory and times of a pair from configs and a device's figures."""
