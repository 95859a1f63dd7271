"""How the files of a reported checkpoint get into storage."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs

from ..errors import ConfigError, ConfigTypeError
from ..storage.uri import check_name

if TYPE_CHECKING:
    from ..storage.checkpoint import Checkpoint

__all__ = ["CheckpointUploadMode", "UploadOptions"]


class CheckpointUploadMode(Enum):
    """When and how ``report()`` brings a checkpoint's files into storage.

    Source:
        ``ray.train.CheckpointUploadMode``, with the same names and values.
    """

    ASYNC = "ASYNC"
    """``report()`` takes the folder over and returns; a thread uploads it, in the order of the reports."""
    SYNC = "SYNC"
    """``report()`` returns when the files are durable."""
    NO_UPLOAD = "NO_UPLOAD"
    """The files lie in a folder of the run already; they are checked and committed as they are."""

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether the local folder goes after the upload when the caller says nothing: only with ASYNC."""
        return self is CheckpointUploadMode.ASYNC


@attrs.frozen(kw_only=True)
class UploadOptions:
    """What ``report()`` was told about the upload, checked.

    Attributes:
        dir_name: Name for the checkpoint's folder, or None for the number of the report.
        mode: When the files are uploaded.
        deletes_local: Whether the local folder goes afterwards; None: not said, as the mode has it.
        upload_fn: The user's own upload, or None.
    """

    dir_name: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.SYNC
    deletes_local: bool | None = None
    upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None

    @property
    def gives_folder_away(self) -> bool:
        """Whether the local folder is the library's from now on."""
        if self.mode is CheckpointUploadMode.NO_UPLOAD:
            return False
        if self.deletes_local is None:
            return self.mode.default_delete_local_checkpoint_after_upload()
        return self.deletes_local

    @classmethod
    def of_report(
        cls, *, dir_name: Any, mode: Any, deletes_local: Any, upload_fn: Any, validation: Any
    ) -> UploadOptions:
        """The options of one call.

        Raises:
            ConfigTypeError: A value of the wrong type.
            ConfigError: A value that is not allowed, or a combination that contradicts itself.
        """
        if validation:
            raise ConfigError(
                "report(validation=...) is not supported yet; evaluate in the train function and report the numbers"
            )
        if dir_name is not None:
            check_name("report(checkpoint_dir_name=...)", dir_name)
        try:
            # By value, so that Ray Train's own members and their names do as well.
            known = CheckpointUploadMode(getattr(mode, "value", mode))
        except ValueError:
            names = ", ".join(f"CheckpointUploadMode.{member.name}" for member in CheckpointUploadMode)
            raise ConfigError(f"report(checkpoint_upload_mode=...) must be one of {names}, got {mode!r}") from None
        if deletes_local is not None and not isinstance(deletes_local, bool):
            raise ConfigTypeError(
                f"report(delete_local_checkpoint_after_upload=...) must be True, False or None, got {deletes_local!r}"
            )
        if upload_fn is not None and not callable(upload_fn):
            raise ConfigTypeError(
                "report(checkpoint_upload_fn=...) must be a function (checkpoint, checkpoint_dir_name) -> Checkpoint, "
                f"got {type(upload_fn).__name__}"
            )
        if upload_fn is not None and known is CheckpointUploadMode.NO_UPLOAD:
            raise ConfigError("report(checkpoint_upload_fn=...) uploads, and CheckpointUploadMode.NO_UPLOAD does not")
        return cls(dir_name=dir_name, mode=known, deletes_local=deletes_local, upload_fn=upload_fn)
