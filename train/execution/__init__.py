"""Running the train function: deciding is pure (``decide``, ``ranks``, ``progress``), acting is thin.

``controller`` directs a run on a Ray cluster, ``worker_group`` and ``worker`` carry it out,
``local`` runs everything in the calling process. ``ledger`` is the one place where reports
become history, checkpoints and events, whichever of the two runs.
"""
