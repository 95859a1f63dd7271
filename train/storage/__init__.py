"""Where runs are stored: checkpoints that exist only when they are whole, and what belongs to them.

Import from the modules; this package loads nothing by itself.
"""
