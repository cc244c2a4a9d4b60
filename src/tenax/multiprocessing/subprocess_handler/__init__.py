"""TorchElastic's ``SubprocessHandler``: one program in one process."""

from tenax.multiprocessing.subprocess_handler.handlers import get_subprocess_handler
from tenax.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
