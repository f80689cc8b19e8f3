"""What goes wrong for a user, one class per kind of fault.

Every message says what, where, both values and what to do. The command line prints it on one line and exits with status 2.
Assertions are for our own bugs and are not of these classes.
"""


class SinkringError(Exception):
    """Base of every error a user can cause and mend. counted: by the metrics of a decoder."""

    counted = False


class GeometryError(SinkringError):
    """Window, sinks, slack, chunk or batch that make no sense together."""


class BundleError(SinkringError):
    """A bundle that is missing, damaged, of another version, or not what its manifest says."""


class InputError(SinkringError):
    """Tokens, text or options that the model cannot take."""


class NumericalError(InputError):
    """Logits that are not finite or have exploded: the stream is stopped, and gives nothing more until it is reset."""


class CapacityError(SinkringError):
    """No free row, no such rollback, a linear cache or the position range used up."""


class UnsupportedError(SinkringError):
    """A model, option or target that sinkring refuses by name."""


class DependencyError(SinkringError):
    """A package or file that this machine lacks; the message says how to get it."""


class DeviceError(SinkringError):
    """A GPU that is out of memory, or that failed in the middle of its work."""


class BuildError(SinkringError):
    """An engine that could not be built, or whose plan breaks a promise."""
