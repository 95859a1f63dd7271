"""Every old name with its new one: the source of the warnings and of the table in ``migration_guide.md``.

Old names are relative to ``ray_lite.air``, new ones to ``ray_lite``. After a change:
``python tests/compat/migration_table.py``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["REMOVED_IN", "ROWS", "SINCE", "Row", "deprecation_text", "not_supported_text"]

SINCE = "0.1"
"""The release from which on the old names warn."""
REMOVED_IN = "1.0"
"""The first release that may lack them."""


class Row(NamedTuple):
    """One old name.

    Attributes:
        new: What to write instead.
        difference: What is not the same there, as whole sentences; or nothing.
        works: False: there is only an error, and ``difference`` says what to do.
    """

    new: str
    difference: str = ""
    works: bool = True


_FOLDER = "Write the values into a folder yourself (json, numpy.save, torch.save)."
_TRIAL = "A run is its only trial."

ROWS: dict[str, Row] = {
    "session.report": Row(
        "train.report",
        "Not a barrier; any subset of the ranks may attach a checkpoint, and the files of all are merged.",
    ),
    "session.get_checkpoint": Row(
        "train.get_checkpoint", "It gives a folder: read it with checkpoint.as_directory() instead of to_dict()."
    ),
    "session.get_dataset_shard": Row(
        "train.get_dataset_shard",
        'The name is "train" by default; one that was not passed raises DatasetNotFoundError.',
    ),
    "session.get_world_size": Row("train.get_context().get_world_size"),
    "session.get_world_rank": Row("train.get_context().get_world_rank"),
    "session.get_local_rank": Row("train.get_context().get_local_rank"),
    "session.get_local_world_size": Row("train.get_context().get_local_world_size"),
    "session.get_node_rank": Row("train.get_context().get_node_rank"),
    "session.get_trial_name": Row("train.get_context().get_trial_name", f"{_TRIAL} This is the name of the run."),
    "session.get_trial_id": Row("train.get_context().get_trial_id", f"{_TRIAL} The id is the same over its restarts."),
    "session.get_trial_resources": Row(
        "train.get_context().get_trial_resources",
        "For the CPUs of this worker alone, say to set its threads, use train.get_context().get_num_cpus().",
    ),
    "session.get_trial_dir": Row(
        "train.get_context().get_trial_dir", f"{_TRIAL} This is where the run lies, for remote storage a URI."
    ),
    "session.get_experiment_name": Row("train.get_context().get_experiment_name"),
    "ScalingConfig": Row("train.ScalingConfig"),
    "RunConfig": Row("train.RunConfig", "All arguments are keywords."),
    "FailureConfig": Row("train.FailureConfig", "All arguments are keywords."),
    "CheckpointConfig": Row("train.CheckpointConfig", "All arguments are keywords."),
    "Result": Row("train.Result"),
    "Checkpoint.from_dict": Row("train.Checkpoint.from_directory", _FOLDER),
    "Checkpoint.to_dict": Row("train.Checkpoint.as_directory", "Read your own files in the folder that it gives."),
    "Checkpoint.from_bytes": Row(
        "train.Checkpoint.from_directory", f"{_FOLDER} Bytes of Ray's to_bytes() are pickles and are not opened."
    ),
    "Checkpoint.to_bytes": Row(
        "train.Checkpoint.to_directory", "A checkpoint may be pickled as it is: it holds the place, not the content."
    ),
    "Checkpoint.from_uri": Row("train.Checkpoint", "Write Checkpoint(uri)."),
    "Checkpoint.to_uri": Row(
        "train.Checkpoint.path", "What was reported lies under RunConfig(storage_path=...) already, be it a URI."
    ),
    "Checkpoint.uri": Row("train.Checkpoint.path", "A local one has no file:// in front."),
    "Checkpoint.get_internal_representation": Row("train.Checkpoint.path", "A checkpoint is always a folder."),
    "DatasetConfig": Row(
        "train.DataConfig",
        'pass dataset_config=train.DataConfig(datasets_to_split=["train"]) to the trainer',
        works=False,
    ),
    "Checkpoint.from_object_ref": Row(
        "train.Checkpoint.from_directory",
        "write ray.get(ref) into a folder and use train.Checkpoint.from_directory(folder)",
        works=False,
    ),
    "Checkpoint.to_object_ref": Row(
        "train.Checkpoint",
        "ray.put(checkpoint), which sends the place and not the content",
        works=False,
    ),
    "Checkpoint.get_preprocessor": Row(
        "train.Checkpoint.get_metadata",
        "save the preprocessor as a file of the checkpoint, or what describes it with checkpoint.set_metadata({...})",
        works=False,
    ),
    "Checkpoint.set_preprocessor": Row(
        "train.Checkpoint.set_metadata",
        "save the preprocessor as a file of the checkpoint, or what describes it with checkpoint.set_metadata({...})",
        works=False,
    ),
}


def deprecation_text(old: str) -> str:
    """The warning about a name that works."""
    row = ROWS[old]
    text = f"`ray_lite.air.{old}` is deprecated; use `ray_lite.{row.new}`."
    return f"{text} {row.difference}" if row.difference else text


def not_supported_text(old: str) -> str:
    """The error about a name that does not."""
    row = ROWS[old]
    return f"`ray_lite.air.{old}` is not supported by ray_lite. Instead: {row.difference}; see `ray_lite.{row.new}`"
