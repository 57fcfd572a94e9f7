"""What a scenario asks to be told of the end of its run: a command, a webhook."""

from cloudai_mbridge.completion.hook import Ended, completion

__all__ = ["Ended", "completion"]
