"""The server on a Ray cluster (extra ``ray``): ``app`` for Ray Serve, and batches by Ray Data."""

from specrt.engines.errors import BackendError

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise BackendError("Ray is not installed; install it with pip install 'specrt[ray]'") from error

from specrt.serving.ray.deployment import app as app
from specrt.serving.ray.deployment import build as build
