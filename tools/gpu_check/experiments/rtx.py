"""Whether TensorRT-RTX loads an engine on this GPU, and what it says where it does not."""

from __future__ import annotations

import numpy as np

from specrt.engines.contract import LOGITS
from specrt.engines.errors import BackendError
from specrt.engines.gpu import device
from specrt.engines.interface import write_pass
from specrt.engines.trt.library import deserialize, known_capabilities, load_library
from specrt.engines.trt.network import make_logger
from specrt.engines.trt.record import RECORD_NAME, engines_folder, record_from_bundle
from specrt.tools.gpu_check.experiment import Failed, Notes, Skip
from specrt.tools.gpu_check.experiments.places import on_tensorrt
from specrt.tools.gpu_check.kit import Kit

RTX = "tensorrt-rtx"


def check_rtx(kit: Kit, notes: Notes) -> None:
    """Deserialize the target's engine as it was built elsewhere, then run a pass of it."""
    bundle = kit.standard
    if bundle is None:
        raise Skip("needs a bundle for TensorRT-RTX")
    trt, capability = load_library(RTX), device.open_device().api.compute_capability
    known = known_capabilities(trt)
    notes.add("library", trt.__version__)
    notes.add("compute capability", capability)
    logger = make_logger(trt)
    if not (engines_folder(bundle, RTX) / RECORD_NAME).is_file():
        raise Skip("the kit has no engines for TensorRT-RTX; make it where the library is installed")
    path = engines_folder(bundle, RTX) / record_from_bundle(bundle, RTX).engines["target"].file
    try:
        deserialize(trt, trt.Runtime(logger), path, "specrt build", logger.errors)
    except BackendError as error:
        notes.add("its words", logger.errors)
        if known and capability not in known:
            raise Skip(f"TensorRT-RTX refuses compute capability {capability}, as expected ({error})") from error
        raise Failed(str(error)) from error
    place = on_tensorrt(bundle, RTX)
    entry, engine = place.model()
    binding = engine.open()
    write_pass(binding.host, np.arange(entry.spec.max_rows), 0, entry.spec.max_rows)
    binding.upload()
    binding.run(entry.spec.max_rows, entry.spec.max_rows)
    logits = binding.read(LOGITS)[0]
    binding.close()
    notes.add("largest logit", float(np.abs(logits).max()))
    if not np.isfinite(logits).all():
        raise Failed("the engine runs, and its logits are not finite")
