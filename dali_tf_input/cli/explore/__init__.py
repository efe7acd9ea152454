"""The command ``explore``: the contents of records, and problems that would hurt training."""
