"""Every error that crosses a boundary between Topspin's parts.

    TopspinError
    +-- ConfigError (ValueError)      start-up: a setting, a file or a model that cannot be served
    |   +-- CheckpointError           a checkpoint lacks a tensor, or one has the wrong shape
    +-- RequestError                  the client's fault; carries an HTTP 4xx status
    |   +-- InvalidRequest            400
    |   +-- NotFound                  404
    +-- EngineError                   our fault; carries an HTTP 5xx status, or 429
    |   +-- EngineUnavailable         503: not ready, or draining
    |   +-- Overloaded                429: there is no room for one more request
    |   +-- RequestTimeout            504: its time is over
    |   +-- NodeLost                  503: a node or the scheduler died
    |   |   +-- NodeSilent            503: it may live
    |   |   +-- NodeGivenUp           503: it lives, and must not
    |   +-- Poison                    500: nodes died whenever they computed the request
    |   +-- StepUnfinished            503: a step did not finish within its deadline
    +-- ProtocolError                 a peer broke the contract of the protocol
    |   +-- VersionMismatch           a peer of another version, or another checkpoint
    +-- TransportError                the data plane
        +-- PeerLost                  the connection closed
        +-- DeadlineExceeded          nothing came within the deadline
        +-- StaleFrame                an old incarnation, table version or sequence
        +-- Interrupted               the scheduler has ended the generation
        +-- FrameError                wrong shape, dtype, size or checksum
        +-- UntrustedPeer             no proof of an accepted key

Programmer errors stay `assert`; user input never reaches an assert. This module
knows no transport and no HTTP framework: the gateway maps `status` and `code`.
"""

from __future__ import annotations


class TopspinError(Exception):
    """Root of the tree; `code` is the stable, machine-readable name of the error's kind."""

    code = "internal_error"
    status = 500


class ConfigError(TopspinError, ValueError):
    """A setting, file or model that cannot be served; names it, its value, and a fix."""

    code = "invalid_config"


class CheckpointError(ConfigError):
    """A checkpoint is incomplete or damaged; names the file or the tensor."""

    code = "invalid_checkpoint"


class RequestError(TopspinError):
    """The client's fault. `param` is the offending request field, if one can be named."""

    code = "invalid_request_error"
    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, malformed, out of range or unsupported."""


class NotFound(RequestError):
    """The model or the path does not exist."""

    code = "not_found"
    status = 404


class EngineError(TopspinError):
    """The request was fine and could not be served; a client may try again."""

    code = "engine_error"
    status = 503


class EngineUnavailable(EngineError):
    """The engine is not ready, or is draining."""

    code = "engine_unavailable"


class Overloaded(EngineError):
    """The engine serves, and has no room for one more request now.

    It may have some after `retry_after_s`; any request of the same tenant would wait `wait_s` now.
    """

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.wait_s = wait_s


class RequestTimeout(EngineError):
    """The time that the client, or the operator, gives a request is over."""

    code = "request_timeout"
    status = 504


class NodeLost(EngineError):
    """A node (or the scheduler) that held the request died."""

    code = "node_lost"


class NodeSilent(NodeLost):
    """A node has not been heard for too long: it is frozen, starved or cut off."""


class NodeGivenUp(NodeLost):
    """A node that is heard counts as lost: it hangs, or its results are wrong."""


class Poison(EngineError):
    """Nodes died, and did so again, while they computed the request: it is not tried once more."""

    code = "poison"
    status = 500


class StepUnfinished(EngineError):
    """The step that carried the request did not finish."""

    code = "step_failed"


class ProtocolError(TopspinError):
    """A peer broke the contract of the protocol."""

    code = "protocol_error"


class VersionMismatch(ProtocolError):
    """A peer speaks another protocol, runs another revision, or serves another checkpoint."""

    code = "version_mismatch"


class TransportError(TopspinError):
    """The data plane between attention and expert nodes failed."""

    code = "transport_error"


class PeerLost(TransportError):
    """The peer closed the connection, or its process ended."""

    code = "peer_lost"


class SchedulerLost(PeerLost):
    """The control connection has closed: the engine has no scheduler, or counts this node lost."""


class DeadlineExceeded(TransportError):
    """A frame or an answer did not come in time."""

    code = "deadline_exceeded"


class Interrupted(TransportError):
    """A wait was given up because the scheduler has ended the generation it belonged to."""

    code = "interrupted"


class StaleFrame(TransportError):
    """A frame of another incarnation, table version or sequence; its content is not used."""

    code = "stale_frame"


class UntrustedPeer(TransportError):
    """A peer that has not proved an accepted key where keys are needed, or that needs one."""

    code = "untrusted_peer"


class FrameError(TransportError):
    """A frame of the wrong shape, dtype, size or checksum; its content is not used."""

    code = "frame_error"
