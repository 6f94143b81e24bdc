"""``specrt compare``: samplers and models of a bundle on two backends, tensor by tensor."""
