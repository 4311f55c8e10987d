"""What goes wrong for a caller. Each message says what was wanted, what was found, what to do."""

from __future__ import annotations


class SpecEdgeError(Exception):
    """Base of every error that specedge raises on purpose."""


class MissingExtraError(SpecEdgeError):
    """A package is not installed; the message names the pip command that installs it."""


class BundleError(SpecEdgeError):
    """A bundle cannot be read: missing, damaged, of another format, or contradicting itself."""


class DeviceError(SpecEdgeError):
    """A device, provider or number of threads that cannot be had."""


class OptionError(SpecEdgeError, ValueError):
    """An option whose value is invalid, in itself or for this bundle or text.

    Attributes:
        option: The option's name; None where several options together leave no token.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class DrafterError(SpecEdgeError):
    """A drafter that cannot draft: n-gram tables that do not fit, or one that breaks its rules."""


class ReplayError(SpecEdgeError):
    """Recorded rounds that do not fit the request that is to repeat them."""


class PromptError(SpecEdgeError):
    """A prompt that no model can continue, such as an empty one."""


class ContextLengthError(PromptError):
    """A prompt that leaves no room in the context."""


class ExportError(SpecEdgeError):
    """A pair of models cannot be exported."""


class CheckpointError(ExportError):
    """A checkpoint cannot be found, reached or read."""


class PairError(ExportError):
    """The draft does not fit the target."""


class ParityError(ExportError):
    """The exported graph does not compute what the PyTorch model computes."""
