"""What goes wrong while a model is captured."""


class CaptureError(RuntimeError):
    """The model cannot be captured."""


class GraphBreak(CaptureError):
    """The model cannot be captured as one graph, but it can be run as several."""
