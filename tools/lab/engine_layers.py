"""The layers of a graph's engine, built with TensorRT-RTX for tests and tables, and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specrt.engines.contract import WIDTH, Contract
from specrt.engines.trt.layers import EngineLayers, layers_in
from specrt.engines.trt.network import make_logger, parse
from specrt.engines.trt.profiles import Profile, shapes_of


def engine_layers(graph: Path, contract: Contract, profiles: Mapping[str, Profile]) -> EngineLayers:
    """Build the file ``graph`` with TensorRT-RTX for ``profiles`` and list its layers.

    Raises ``BackendError`` for a graph that cannot be read, ``RuntimeError`` with the builder's message for one that
    cannot be built.
    """
    import tensorrt_rtx as trt

    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = parse(trt, builder, logger, graph)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for sizes in profiles.values():
        profile = builder.create_optimization_profile()
        for name, shapes in shapes_of(contract, sizes).items():
            profile.set_shape(name, *shapes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError(f"{graph}: {logger.errors[0] if logger.errors else 'no reason given'}")
    found = layers_in(logger.listing, list(profiles))
    if found is None:
        raise RuntimeError(f"{graph}: {trt.__name__} {trt.__version__} lists no layers")
    return found


def profile_width(profile: Profile) -> int:
    """The widest pass of a profile."""
    return profile[WIDTH][-1]
