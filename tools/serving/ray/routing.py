"""The request router of the replicas: the same key goes to the same replica, unless that one is busy."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import RequestRouter

from specrt.serving.protocol.routing import ranked


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks the replicas by the session of a request's handle, which the gateway sets to its routing key.

    A replica with ``busy_at`` requests or more comes after those with fewer. Ray Serve's numbers of requests include
    those of other gateways and are forgotten after 10 s, the router's own are not.
    """

    _busy_at = 1
    _num_own: Counter[Any]

    def initialize_state(self, busy_at: int = 1, **others: Any) -> None:
        """Takes ``request_router_kwargs``."""
        self._busy_at, self._num_own = busy_at, Counter()

    def on_send_request(self, replica_id: Any) -> None:
        """Count a request, until it has ended."""
        super().on_send_request(replica_id)
        self._num_own[replica_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """A request that was sent has ended, however it did."""
        self._num_own[replica_id] = max(0, self._num_own[replica_id] - 1)

    def _num_requests(self, replica_id: Any) -> int:
        return max(self._num_own[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Groups of one replica each, to be tried in this order."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait where all replicas are full
        metadata = pending_request.metadata
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = [by_name[name] for name in ranked(metadata.session_id or metadata.internal_request_id, by_name)]
        order.sort(key=lambda replica: max(self._num_requests(replica.replica_id) - self._busy_at + 1, 0))  # stable
        return [[replica] for replica in order]
