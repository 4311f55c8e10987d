"""Exceptions. Messages state what was expected, what was found and how to fix it."""

from __future__ import annotations


class SpecEdgeError(Exception):
    """Base class of all errors that specedge raises on purpose."""


class MissingExtraError(SpecEdgeError):
    """Missing package; the message has the pip command that installs it."""


class BundleError(SpecEdgeError):
    """Bundle that is missing, damaged, inconsistent or of an unsupported format."""


class DeviceError(SpecEdgeError):
    """Device, provider or number of threads that is not available."""


class OptionError(SpecEdgeError, ValueError):
    """Invalid value of an option, in general or for a particular bundle or prompt.

    Attributes:
        option: Name of the option; None if several options together exclude every token.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class DrafterError(SpecEdgeError):
    """Drafter that cannot be used or that violates the drafter protocol."""


class ReplayError(SpecEdgeError):
    """Recorded rounds that do not match the request that replays them."""


class PromptError(SpecEdgeError):
    """Prompt that cannot be continued, such as an empty one."""


class ContextLengthError(PromptError):
    """Prompt that is too long for the context."""


class ExportError(SpecEdgeError):
    """Models that cannot be exported."""


class CheckpointError(ExportError):
    """Checkpoint that cannot be found, downloaded or read."""


class PairError(ExportError):
    """Draft model that does not match the target."""


class ParityError(ExportError):
    """Exported graph whose outputs differ from the PyTorch model's."""
